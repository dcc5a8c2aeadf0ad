"""The forward pass, against transformers' values and against itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, layers, registry
from models.config import ModelConfig
from tests import golden
from tests.golden import tiny
from tests.models import run
from tests.models.files import write_hf

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=101,
    embed_dim=26,
    mlp_dim=37,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    qkv_bias=True,
)


@pytest.fixture(scope="module", params=list(tiny.CONFIGS))
def model(request, tmp_path_factory):
    return request.param, registry.load(write_hf(tmp_path_factory.mktemp("hf"), request.param))


def test_logits_equal_those_of_transformers(model):
    name, loaded = model
    found = run.logits(loaded.params, loaded.config, tiny.tokens(name))[:, jnp.array(tiny.POSITIONS)]
    np.testing.assert_allclose(found, golden.tiny_logits(name), atol=1e-4, rtol=0)


def test_the_golden_logits_notice_the_scaling_of_rope(model):
    """Negative control: without llama3 scaling, or with another theta, the comparison above must fail."""
    name, loaded = model
    values = loaded.config.to_dict() | {"rope_scaling": None, "rope_theta": 20_000.0 if name == "qwen2" else 10_000.0}
    found = run.logits(loaded.params, ModelConfig.from_dict(values), tiny.tokens(name))[:, jnp.array(tiny.POSITIONS)]
    assert np.abs(found - golden.tiny_logits(name)).max() > 0.05


def test_a_cache_gives_the_logits_of_the_whole_text(model):
    name, loaded = model
    tokens, start, found = tiny.tokens(name), 0, []
    cache = run.empty_cache(loaded.config, tiny.B, tiny.T)
    for size in (65, 1, 65):
        positions = np.broadcast_to(np.arange(start, start + size), (tiny.B, size))
        x, cache = run.step(loaded.params, loaded.config, tokens[:, start : start + size], positions, cache)
        found.append(x)
        start += size
    logits = decoder.unembed(loaded.params, loaded.config, jnp.concatenate(found, axis=1))
    np.testing.assert_allclose(logits, run.logits(loaded.params, loaded.config, tokens), atol=5e-5, rtol=0)


def test_parameters_are_plain_dicts_of_stacked_layers():
    params = decoder.init(CONFIG, jax.random.key(0), jnp.bfloat16)
    assert type(params) is dict and type(params["layers"]["attn"]) is dict
    assert params["layers"]["attn"]["o"]["kernel"].shape == (3, 6, 10, 26)
    assert params["layers"]["attn"]["k"]["bias"].shape == (3, 2, 10)
    assert params["layers"]["mlp"]["down"]["kernel"].shape == (3, 37, 26)
    assert params["head"]["kernel"].shape == (26, 101)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.abstract(CONFIG, jnp.bfloat16))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == described


def test_layers_differ_and_a_tied_head_is_the_embedding():
    values = CONFIG.to_dict() | {"tied_embeddings": True}
    params = decoder.init(ModelConfig.from_dict(values), jax.random.key(0))
    kernels = params["layers"]["attn"]["q"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
    np.testing.assert_array_equal(params["head"]["kernel"], params["embed"]["embedding"].T)


def test_attend_sees_every_layer_in_turn_and_ys_are_stacked():
    params = decoder.init(CONFIG, jax.random.key(1))
    tokens, positions = jnp.arange(10).reshape(2, 5), jnp.broadcast_to(jnp.arange(5), (2, 5))

    def attend(layer, q, k, v, carry):
        assert (q.shape, k.shape, v.shape) == ((2, 5, 6, 10), (2, 5, 2, 10), (2, 5, 2, 10))
        return q, carry * 10 + layer + 1, {"layer": layer, "k": k}

    forward = jax.jit(lambda params: decoder.hidden_states(params, CONFIG, tokens, positions, attend, jnp.int32(0)))
    x, carry, ys = forward(params)
    assert x.shape == (2, 5, 26)
    assert int(carry) == 123
    np.testing.assert_array_equal(ys["layer"], [0, 1, 2])
    assert ys["k"].shape == (3, 2, 5, 2, 10)


def test_unstacked_layers_give_the_same_numbers_and_are_stacked_again():
    params = decoder.init(CONFIG, jax.random.key(3))
    tokens = np.arange(14).reshape(2, 7)
    before = np.asarray(run.logits(params, CONFIG, tokens))
    kept = jax.tree.map(np.asarray, params["layers"])
    apart = decoder.unstack(params)
    assert len(apart["layers"]) == CONFIG.num_layers
    assert params["layers"]["mlp"]["up"]["kernel"].is_deleted()  # no second copy of the model
    np.testing.assert_allclose(run.logits(apart, CONFIG, tokens), before, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, decoder.stacked(apart), kept)
    np.testing.assert_array_equal(decoder.stacked(apart, "attn", "o", "kernel"), kept["attn"]["o"]["kernel"])


def test_an_unrolled_loop_gives_the_same_numbers_carry_and_ys():
    """The way of a GPU, where `attend` gets its layer as an int."""
    params = decoder.unstack(decoder.init(CONFIG, jax.random.key(3)))
    tokens, positions = jnp.arange(10).reshape(2, 5), jnp.broadcast_to(jnp.arange(5), (2, 5))

    def attend(layer, q, k, v, carry):
        return q + jnp.repeat(k + v, 3, axis=2), carry * 10 + layer + 1, {"k": k}

    run_as = lambda unroll: decoder.hidden_states(
        params, CONFIG, tokens, positions, attend, jnp.int32(0), unroll=unroll
    )
    (x, carry, ys), (other, same, others) = run_as(False), run_as(True)
    np.testing.assert_allclose(x, other, atol=1e-6)
    np.testing.assert_allclose(ys["k"], others["k"], atol=1e-6)
    assert int(carry) == int(same) == 123


@pytest.mark.parametrize("rows", [1, 3, 8, 9])
def test_rows_that_are_padded_on_an_accelerator_change_nothing(rows, monkeypatch):
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, 7), (7, 5)]))
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = layers.product(x, kernel)
    assert found.shape == (rows, 5)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_later_token_changes_nothing_before_it():
    params = decoder.init(CONFIG, jax.random.key(2))
    tokens = np.arange(14).reshape(2, 7)
    changed = tokens.copy()
    changed[:, 4] = 99
    before, after = (np.asarray(run.logits(params, CONFIG, t)) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=(0, 2)).min() > 0


def test_bfloat16_stays_bfloat16_and_logits_are_float32():
    def forward(params):
        tokens, positions = jnp.zeros((1, 3), jnp.int32), jnp.arange(3)[None]
        x, _, _ = decoder.hidden_states(params, CONFIG, tokens, positions, decoder.attend_dense, None)
        return x, decoder.unembed(params, CONFIG, x)

    x, logits = jax.eval_shape(forward, decoder.abstract(CONFIG, jnp.bfloat16))
    assert (x.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_attend_dense_equals_plain_loops():
    B, T, N, K, H = 2, 5, 6, 2, 4
    rng = np.random.default_rng(4)
    q, k, v = (3 * rng.standard_normal((B, T, heads, H)).astype(np.float32) for heads in (N, K, K))
    expected = np.zeros((B, T, N, H))
    for b, t, n in np.ndindex(B, T, N):
        scores = np.array([q[b, t, n] @ k[b, s, n // (N // K)] for s in range(t + 1)], np.float64) / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        expected[b, t, n] = weights / weights.sum() @ v[b, : t + 1, n // (N // K)]
    out, carry, y = decoder.attend_dense(jnp.int32(0), *map(jnp.asarray, (q, k, v)), carry="kept")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert (carry, y) == ("kept", None)


def test_a_step_compiles_once():
    params = decoder.init(CONFIG, jax.random.key(5))
    cache = run.empty_cache(CONFIG, 1, 8)
    step: Any = run.step  # pyright does not know what jit adds
    step.clear_cache()
    for i in range(4):
        _, cache = step(params, CONFIG, np.array([[i]]), np.array([[i]]), cache)
    assert step._cache_size() == 1
