"""The sketch's bounds on keys and queries of real models: every page of every layer and head, at several positions."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, registry
from models.errors import ModelError
from skg_jax import tokenizer
from skg_jax.kv import sketch
from skg_jax.types import BLOCK
from tests.golden.prompts import PROMPTS
from tests.kv import oracle
from tests.kv.oracle import f64

MODELS = ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"]
TOKENS = 10 * BLOCK + 8
ASKING = 8  # positions at the end of the prompt whose queries are tried


class Captured(NamedTuple):
    """Full blocks of all layers: keys [L,P,K,64,H]; queries [L,Q,K,G,H] of the last positions."""

    keys: np.ndarray
    q: np.ndarray


@functools.cache
def captured(name: str) -> Captured:
    """Keys and queries as attention sees them, after rotation; skips where the model is absent."""
    try:
        model = registry.load(name)
    except ModelError as missing:
        pytest.skip(str(missing))
    tokens = jnp.asarray(tokenizer.load(model.path).encode(PROMPTS["ledger"])[:TOKENS])[None]
    assert tokens.shape == (1, TOKENS)

    def attend(layer, q, k, v, carry):
        out, carry, _ = decoder.attend_dense(layer, q, k, v, carry)
        return out, carry, (q[0, -ASKING:], k[0, : TOKENS // BLOCK * BLOCK])

    run = lambda params: decoder.hidden_states(params, model.config, tokens, jnp.arange(TOKENS)[None], attend, ())[2]
    q, k = (np.asarray(x) for x in jax.jit(run)(model.params))
    keys = k.reshape(k.shape[0], -1, BLOCK, *k.shape[2:]).swapaxes(2, 3)
    return Captured(keys, q.reshape(*q.shape[:2], k.shape[2], -1, k.shape[3]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("page_size", "kind"), [(16, "sketch"), (64, "sketch"), (16, "group"), (16, "box")])
@pytest.mark.parametrize("name", MODELS)
def test_bounds_hold_for_every_page_of_a_real_model(name, page_size, kind):
    keys, q = captured(name)
    record, fits = jax.jit(sketch.build)(keys)
    assert np.asarray(fits).all()
    scores_of = jax.jit(lambda q: sketch.page_scores(q, record, page_size, kind))
    gaps = []
    for at in range(ASKING):
        queries = np.broadcast_to(q[:, at][:, None], (*keys.shape[:3], *q.shape[3:]))
        scores, exact = scores_of(queries), oracle.log_mass(oracle.logits(queries, keys), page_size)
        assert ((f64(scores.lower) <= exact) & (exact <= f64(scores.upper))).all()
        gaps.append(f64(scores.upper) - f64(scores.lower))
    median = np.median(np.stack(gaps))
    print(f"{name}, page {page_size}, {kind}: {np.stack(gaps).size} pages and heads, median gap {median:.2f} nats")
    assert median > 10 if kind == "box" else median < 4
