"""Which implementation runs: Mosaic GPU kernels on a Hopper GPU, XLA everywhere else.

A kernel that cannot do a case raises NotImplementedError with a sentence. Where no implementation was asked for, the
case then falls through to XLA, and the sentence is logged once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

type Implementation = Literal["xla", "mosaic_gpu"]

_log = logging.getLogger("skg_jax")


def choose[T](implementation: Implementation | None, kernel: Callable[[], T], twin: Callable[[], T]) -> T:
    """Run `kernel` or its XLA `twin`, both closed over the same arguments.

    Args:
      implementation: None takes the kernel where the machine and the case allow it.

    Raises:
      NotImplementedError: if "mosaic_gpu" was asked for and cannot do the case.
    """
    if implementation == "mosaic_gpu":
        return kernel()
    if implementation == "xla" or not available():
        return twin()
    try:
        return kernel()
    except NotImplementedError as reason:
        _say_once(str(reason))
        return twin()


def available() -> bool:
    """Whether programs are made for a Hopper GPU: this machine's default device, or the target of `lowering`."""
    return _lowering or _hopper()


def interpret(asked: bool | None = None) -> Any:
    """`interpret=` of a kernel. None: compiled for a GPU, interpreted with race detection elsewhere."""
    on = not (_lowering or jax.default_backend() == "gpu") if asked is None else asked
    return plgpu.InterpretGPUParams(detect_races=True) if on else None


_lowering = False


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Trace as if for a Hopper GPU, to lower whole programs where there is none (`lowering_platforms=("cuda",)`)."""
    global _lowering
    _lowering = True
    try:
        yield
    finally:
        _lowering = False


@functools.cache
def _hopper() -> bool:
    return jax.default_backend() == "gpu" and getattr(jax.devices()[0], "compute_capability", "") == "9.0"


@functools.cache
def _say_once(reason: str) -> None:
    _log.info("%s XLA is used instead.", reason)
