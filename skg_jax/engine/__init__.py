"""The host side: requests in, text and certificates out."""

from __future__ import annotations

from skg_jax.engine.engine import Engine, load
from skg_jax.engine.options import Options, RequestError
from skg_jax.engine.result import Result, Timing
from skg_jax.engine.run import Piece, Run

__all__ = ["Engine", "Options", "Piece", "RequestError", "Result", "Run", "Timing", "load"]
