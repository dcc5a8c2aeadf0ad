"""Attention of one decode step, for every layer: what the model calls back. Sparse with evidence, or exact."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skg_jax import attention
from skg_jax.audit import LayerEvidence, layer_evidence
from skg_jax.decode.state import Program
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.scoring import forced_pages, score_pages
from skg_jax.selectors import SelectContext


class LayerTrace(NamedTuple):
    """What one sparse layer leaves behind."""

    selected: Int[Array, " B"]  # pages read, over KV heads
    evidence: LayerEvidence | None


def sparse_attend(program: Program, position: Int[Array, " B"], budget: Float[Array, " B"]):
    """Attention callback over the pages that the selector takes. Carry: (cache, selector state, all bounds)."""
    audit, length = program.audit, position + 1
    exact_norms = program.guarded and audit.residual == "output"  # of the output, before it is rounded

    def attend(layer, q, k, v, carry):
        layer = jnp.asarray(layer, jnp.int32)  # an int where layers are unrolled
        out_dtype = jnp.float32 if exact_norms else q.dtype
        cache, selector_state, bounds = carry
        cache = kv.append(cache, layer, k[:, 0], v[:, 0], position, program.implementation)
        kind = audit.bounds if program.guarded else None  # who does not audit needs no bounds
        estimate, bounds = score_pages(
            q[:, 0], cache, layer, length, audit.page_size, kind, bounds, program.implementation
        )
        must = forced_pages(cache, length, audit.page_size, audit.sink_pages, audit.recent_pages)
        ctx = SelectContext(estimate, must, -(-length // audit.page_size), layer)
        selection, selector_state = program.selector.select(ctx, selector_state, budget)
        out, lse = attention.sparse(
            q[:, 0], cache, layer, selection, length, audit.page_size, out_dtype=out_dtype,
            implementation=program.implementation,
        )  # fmt: skip
        evidence = None
        if program.guarded:
            evidence = layer_evidence(q[:, 0], out, lse, selection)
        trace = LayerTrace(selection.num_pages.sum(1), evidence)
        return out[:, None].astype(q.dtype), (cache, selector_state, bounds), trace

    return attend


def exact_attend(program: Program, position: Int[Array, " B"]):
    """Attention callback over everything. Carry: the cache."""

    def attend(layer, q, k, v, cache: PagedKVCache):
        layer = jnp.asarray(layer, jnp.int32)  # an int where layers are unrolled
        cache = kv.append(cache, layer, k[:, 0], v[:, 0], position, program.implementation)
        out, _ = attention.dense(
            q[:, 0], cache, layer, position + 1, out_dtype=q.dtype, implementation=program.implementation
        )
        return out[:, None], cache, None

    return attend


def prefill_attend(row: Int[Array, ""], blocks: Int[Array, " n"], start: Int[Array, ""], filled: Int[Array, " n"]):
    """Attention callback of a prefill chunk: whole blocks are written, then attended to causally. Carry: the cache."""

    def attend(layer, q, k, v, cache: PagedKVCache):
        by_block = lambda x: x[0].reshape(blocks.shape[0], -1, *x.shape[2:]).swapaxes(1, 2)
        cache = kv.write_blocks(cache, layer, blocks, by_block(k), by_block(v), filled)
        out = attention.prefill(q, cache, layer, row, start)
        return out.astype(q.dtype), cache, None

    return attend


def pages_in_use(program: Program, position: Int[Array, " B"]) -> Int[Array, " B"]:
    """Pages of a step over all layers and KV heads."""
    per_head = -(-(position + 1) // program.audit.page_size)
    return (per_head * program.model.num_layers * program.model.num_kv_heads).astype(jnp.int32)
