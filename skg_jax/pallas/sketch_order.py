"""In which order a thread block of the sketch scorer takes its tasks.

A task is some heads of one step of the sequence; warpgroups take tasks in turn. Where a warpgroup goes on with the same
heads for a run of steps, each of its warps writes a run of pages instead of half a sector of memory at a time
(docs/adr/0013). What is left behind the last whole runs is dealt out task by task.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Task(NamedTuple):
    """What a task is; traced integers."""

    step: Any  # of the thread block
    chunk: Any  # which of its groups of heads
    index: Any  # in its run
    run: Any  # steps of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Static: consumer warpgroups, groups of heads of a step, steps of a run."""

    groups: int
    chunks: int
    run: int

    @property
    def lap(self) -> int:
        """Tasks after which all groups of heads have come as far."""
        return self.run * math.lcm(self.groups, self.chunks)

    def task(self, number, of) -> Task:
        """The task of a number, 0 <= number < of; warpgroup number % groups takes it."""
        alone = divided(number, self.chunks)
        if self.run == 1:
            return Task(*alone, 0, 1)
        turn, group = divided(number, self.groups)
        runs, index = divided(turn, self.run)
        first, chunk = divided(runs * self.groups + group, self.chunks)
        in_run = number < of - divided(of, self.lap)[1]
        pick = lambda a, b: jnp.where(in_run, a, b)
        return Task(pick(first * self.run + index, alone[0]), pick(chunk, alone[1]), pick(index, 0), pick(self.run, 1))


def divided(x, by: int):
    """Quotient and remainder of a number that is not negative: the signed ones of Python take ten instructions."""
    if by & (by - 1) == 0:
        return lax.shift_right_logical(x, jnp.int32(by.bit_length() - 1)), x & (by - 1)
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))
