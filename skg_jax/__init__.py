"""Page-sparse long-context decoding with an audited, per-request bound on the attention left out.

The names below load on first use: `import skg_jax` imports neither jax nor a module of this package, so that a command
line is parsed, and a wrong flag refused, before jax starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skg_jax.engine import Engine, Options, Result, load
    from skg_jax.guard import Certificate, GuardConfig, Verdict
    from skg_jax.selectors import Selection, Selector

# Public name -> module that defines it. A new name goes here, into the block above and into __all__.
_MODULES = {
    "Certificate": "guard",
    "Engine": "engine",
    "GuardConfig": "guard",
    "Options": "engine",
    "Result": "engine",
    "Selection": "selectors",
    "Selector": "selectors",
    "Verdict": "guard",
    "load": "engine",
}
__all__ = ["Certificate", "Engine", "GuardConfig", "Options", "Result", "Selection", "Selector", "Verdict", "load"]


def __getattr__(name: str) -> Any:
    """Imports the module of a public name and keeps the name (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value = version("skg-jax")
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"skg_jax.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'skg_jax' has no public name {name!r}; it has {', '.join(__all__)}.")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
