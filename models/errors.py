"""The one error of this package."""


class ModelError(ValueError):
    """A model that cannot be loaded as asked; the message is one sentence that says what to do."""
