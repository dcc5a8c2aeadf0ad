"""Shape vocabulary and constants shared by every room. Letters: docs/glossary.md."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Bool, Float, Int, UInt32

# Memory is allocated, sealed and sketched in blocks; pages of 16, 32 or 64 tokens live inside them.
BLOCK = 64
PAGE_SIZES = (16, 32, 64)

type Array = jax.Array
type Params = dict[str, Any]
type PRNGKey = jax.Array

__all__ = ["BLOCK", "PAGE_SIZES", "Array", "Bool", "Float", "Int", "PRNGKey", "Params", "UInt32"]
