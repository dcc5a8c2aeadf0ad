"""Compiled prefill and decoding."""

from __future__ import annotations

from skg_jax.decode.compiling import compiled
from skg_jax.decode.loop import decode_loop, prefill, seal_full
from skg_jax.decode.shadow import shadow_attempt
from skg_jax.decode.state import Mode, Program, Requests, Rows, StepInfo, empty_log, first_rows

__all__ = [
    "Mode",
    "Program",
    "Requests",
    "Rows",
    "StepInfo",
    "compiled",
    "decode_loop",
    "empty_log",
    "first_rows",
    "prefill",
    "seal_full",
    "shadow_attempt",
]
