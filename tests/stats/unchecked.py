"""Calls without the check of signatures that the tests switch on: a user's call has none."""

import contextlib

import jaxtyping


@contextlib.contextmanager
def unchecked():
    """Within it shapes are refused by the package itself, or not at all."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
