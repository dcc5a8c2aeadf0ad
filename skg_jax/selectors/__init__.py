"""Page selectors by name."""

from __future__ import annotations

import functools

from skg_jax.selectors.base import SelectContext, Selection, Selector
from skg_jax.selectors.dense import dense
from skg_jax.selectors.topk import topk
from skg_jax.selectors.topp import topp

SELECTORS = {"dense": dense, "topk": topk, "topp": topp}


@functools.cache
def get(name: str) -> Selector:
    """The selector of that name, every time the same one: programs compare selectors by their functions.

    Raises:
      ValueError: if there is none.
    """
    if name not in SELECTORS:
        raise ValueError(f"unknown selector {name!r}; choose one of {', '.join(SELECTORS)}.")
    return SELECTORS[name]()


__all__ = ["SELECTORS", "SelectContext", "Selection", "Selector", "dense", "get", "topk", "topp"]
