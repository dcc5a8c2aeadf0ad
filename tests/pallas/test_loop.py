"""The whole guarded loop at Llama-3.1-8B's shape, lowered for a Hopper GPU where there is none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, published
from skg_jax.bench import steps, synthesis
from skg_jax.decode import Program
from skg_jax.guard import GuardConfig
from skg_jax.kv import cache as kv
from skg_jax.pallas import dispatch
from skg_jax.selectors import get

KERNELS = {
    "dense": ("paged_append", "paged_decode"),
    "sparse": ("paged_append", "sketch_score", "select_pages_by_count", "paged_decode"),
    "guarded": ("paged_append", "sketch_score", "select_pages_by_count", "paged_decode", "audit_mass"),
}


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
        steps.start(batch, context - 100), np.full((4, batch), steps.FREE, np.int32),
    )  # fmt: skip
    with dispatch.lowering():
        text = steps.loop.trace(*call, program=program).lower(lowering_platforms=("cuda",)).as_text()
    for name in KERNELS[mode]:
        assert name in text, name
