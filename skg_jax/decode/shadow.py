"""Shadow execution: a sparse attempt that also returns the evidence its audit saw.

For tests and studies; not a serving path.
"""

from __future__ import annotations

import functools

import jax

from skg_jax.audit import StepEvidence
from skg_jax.decode.attempt import settle, sparse_step
from skg_jax.decode.state import Program, Requests, Rows, StepInfo
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.types import Params


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def shadow_attempt(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[PagedKVCache, Rows, StepInfo, StepEvidence]:
    """One attempt of `decode_loop` by the sparse branch whatever the tiers, without sealing (see `seal_full`).

    Returns: as `attempt`, and the evidence of every layer. The cache still is the version that the audit saw.
    """
    cache = kv.touch(cache, rows.position)
    got, evidence = sparse_step(params, cache, requests, rows, program)
    assert evidence is not None, "shadow execution needs a guarded program"
    return *settle(params, requests, rows, program, got), evidence
