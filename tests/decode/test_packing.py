"""Numbers of rows as one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.decode.packing import pack, unpack


def test_every_bit_comes_back():
    real = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    tree = {
        "bool": jnp.array([True, False, True, False]),
        "real": jnp.asarray(real),
        "pair": jnp.array([[-(2**31), 1], [2**31 - 1, 0], [-1, 5], [6, 7]], jnp.int32),
    }
    packed = pack(tree)
    assert packed.shape == (4, 4) and packed.dtype == jnp.int32
    back = unpack(packed, jax.tree.map(jnp.zeros_like, tree))
    assert (back["bool"] == tree["bool"]).all() and (back["pair"] == tree["pair"]).all()
    assert (np.asarray(back["real"]).view(np.int32) == real.view(np.int32)).all()


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float16"):
        pack(jnp.zeros(3, jnp.float16))
