"""The whole guarded loop at Llama-3.1-8B's shape, lowered for a Hopper GPU where there is none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, published
from skg_jax.bench import steps, synthesis
from skg_jax.decode import Program, decode_loop, empty_log, prefill
from skg_jax.guard import GuardConfig
from skg_jax.kv import cache as kv
from skg_jax.pallas import dispatch
from skg_jax.selectors import get

KERNELS = {
    "dense": ("paged_append", "paged_decode"),
    "sparse": ("paged_append", "sketch_score", "select_pages_by_count", "paged_decode", "seal_blocks"),
    "guarded": (
        "paged_append", "sketch_score", "select_pages_by_count", "paged_decode", "audit_units", "audit_mass",
        "seal_blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["dense", "guarded", pytest.param("sparse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(8, 65536), pytest.param((1, 131072), marks=pytest.mark.slow)])
def test_every_part_of_the_loop_is_a_kernel(mode, shape):
    config = dataclasses.replace(synthesis.synthetic_config(published.get("llama-3.1-8b")), num_layers=2)
    guard, (batch, context) = GuardConfig(rounds=(1,)), shape
    cache = jax.eval_shape(
        lambda: kv.init(config.num_layers, config.num_kv_heads, config.head_dim, batch, context, jnp.bfloat16)
    )
    program = Program(model=config, mode=mode, selector=get("topk"), audit=guard.audit(16))
    call = (
        decoder.abstract(config, jnp.bfloat16), cache, steps.requests(config, batch, guard, 0.27, 0.1, 100),
        jnp.int32(context - 100), np.full((4, batch), steps.FREE, np.int32), empty_log(4, batch),
    )  # fmt: skip
    with dispatch.lowering():
        text = steps.loop.trace(*call, program=program).lower(lowering_platforms=("cuda",)).as_text()
    for name in KERNELS[mode]:
        assert name in text, name


@pytest.mark.parametrize("mode", ["sparse", "guarded"])
def test_unrolled_layers_share_their_kernels(mode, monkeypatch):
    """As on a GPU, where layers are unrolled: one more layer calls every kernel once more, and lowers none again."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kernels, calls = zip(*(_kernels_and_calls(mode, layers) for layers in (2, 3)), strict=True)
    assert kernels[0] == kernels[1] >= len(KERNELS[mode])
    assert calls[1] > calls[0]


def _kernels_and_calls(mode, layers: int) -> tuple[int, int]:
    """Kernels in the lowered loop over so many layers with arrays of their own, and calls of functions."""
    program, cache, guard = guarded(layers)
    program = dataclasses.replace(program, mode=mode)
    params = decoder.abstract(program.model, jnp.bfloat16)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
    call = (
        params | {"layers": (one,) * layers}, cache, requests_of(program, guard), jnp.int32(8000),
        np.full((4, 8), steps.FREE, np.int32), empty_log(4, 8),
    )  # fmt: skip
    with dispatch.lowering():
        text = steps.loop.trace(*call, program=program).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu_v2"), text.count("call @")


def guarded(layers: int = 2) -> tuple[Program, kv.PagedKVCache, GuardConfig]:
    """Llama-3.1-8B's shape, a few layers of it, and a cache of 8 rows that is never made."""
    config = dataclasses.replace(synthesis.synthetic_config(published.get("llama-3.1-8b")), num_layers=layers)
    guard = GuardConfig(rounds=(1,))
    cache = jax.eval_shape(
        lambda: kv.init(config.num_layers, config.num_kv_heads, config.head_dim, 8, 8192, jnp.bfloat16)
    )
    return Program(model=config, mode="guarded", selector=get("topk"), audit=guard.audit(16)), cache, guard


def requests_of(program: Program, guard: GuardConfig):
    return steps.requests(program.model, 8, guard, 0.27, 0.1, 100)


def test_the_engines_loop_seals_by_a_kernel():
    program, cache, guard = guarded()
    call = decoder.abstract(program.model, jnp.bfloat16), cache, requests_of(program, guard), steps.start(8, 8000)
    with dispatch.lowering():
        text = decode_loop.trace(*call, program=program).lower(lowering_platforms=("cuda",)).as_text()
    assert all(name in text for name in KERNELS["guarded"])


def test_prefill_seals_by_a_kernel():
    program, cache, guard = guarded()
    tokens, zero = jax.ShapeDtypeStruct((1, program.prefill_chunk), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    params = decoder.abstract(program.model, jnp.bfloat16)
    with dispatch.lowering():
        traced = prefill.trace(params, cache, requests_of(program, guard), tokens, zero, zero, zero, program=program)
        assert "seal_blocks" in traced.lower(lowering_platforms=("cuda",)).as_text()
