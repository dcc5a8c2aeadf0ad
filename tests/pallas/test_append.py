"""The append kernel, interpreted with race detection, against its XLA twin; and lowered for sm_90."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import cache as kv
from skg_jax.pallas.append import append
from tests.pallas.decode_cases import races_found

LAYERS, BATCH, BLOCKS = 2, 3, 4
POSITION = jnp.array([64, 63, 201], jnp.int32)  # the first slot of a block, the last one, one inside


def case(heads: int, dim: int, dtype, seed: int = 0):
    """A cache full of numbers with scattered blocks, and a token for each row."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    cache = kv.init(LAYERS, heads, dim, BATCH, BLOCKS * 64, dtype)
    table = jnp.asarray(rng.permutation(BATCH * BLOCKS).reshape(BATCH, BLOCKS), jnp.int32)
    norms = jnp.asarray(rng.uniform(0, 2 * dim**0.5, size=cache.key_norm.shape), jnp.float32)
    cache = cache._replace(k=draw(*cache.k.shape), v=draw(*cache.v.shape), page_table=table, key_norm=norms)
    return cache, draw(BATCH, heads, dim), draw(BATCH, heads, dim)


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(3, 64, jnp.bfloat16), (9, 128, jnp.float16)])
def test_one_token_is_written_and_its_norm_kept(heads, dim, dtype):
    cache, k, v = case(heads, dim, dtype)
    layer = jnp.int32(1)
    found = append(cache.k, cache.v, cache.key_norm, cache.page_table, layer, k, v, POSITION)
    assert not races_found()
    expected = kv.append(cache, layer, k, v, POSITION)
    np.testing.assert_array_equal(found[0], expected.k)
    np.testing.assert_array_equal(found[1], expected.v)
    np.testing.assert_allclose(found[2], expected.key_norm, rtol=1e-6)
    # row 0 begins a block: its norm is that of the new key alone, rounded up
    exact = np.linalg.norm(np.asarray(k[0], np.float64), axis=-1)
    norm = np.asarray(found[2])[1, cache.page_table[0, 1]]
    assert (exact <= norm).all() and (norm <= exact * (1 + 3e-5)).all()


def test_pools_in_float32_are_refused():
    cache, k, v = case(3, 64, jnp.float32)
    with pytest.raises(NotImplementedError, match="bfloat16 or float16"):
        append(cache.k, cache.v, cache.key_norm, cache.page_table, jnp.int32(0), k, v, POSITION)


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (3, 64), (2, 64), (2, 128)])
def test_real_shapes_lower_in_place(heads, dim):
    s, i32 = jax.ShapeDtypeStruct, jnp.int32
    pool, norm = s((2, 512, heads, 64, dim), jnp.bfloat16), s((2, 512, heads), jnp.float32)
    token, table = s((8, heads, dim), jnp.bfloat16), s((8, 64), i32)
    call = jax.jit(lambda *args: append(*args, interpret=False), donate_argnums=(0, 1, 2))
    text = call.trace(pool, pool, norm, table, s((), i32), token, token, s((8,), i32)).lower(
        lowering_platforms=("cuda",)
    ).as_text()  # fmt: skip
    assert text.count("output_operand_alias<") == 3
