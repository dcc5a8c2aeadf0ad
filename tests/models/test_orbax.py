"""Orbax directories: what is saved comes back, and a directory that does not fit is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import registry
from models.errors import ModelError
from tests.models.files import write_gguf, write_hf


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(model, directory) in bfloat16, tied."""
    folder = tmp_path_factory.mktemp("orbax")
    model = registry.load(write_hf(folder / "hf", "qwen2"), dtype=jnp.bfloat16)
    registry.save(folder / "ckpt", model)
    return model, folder / "ckpt"


def _edit(folder, copy, **changes):
    """A copy of a checkpoint, with a changed config.json and the same parameters."""
    copy.mkdir()
    (copy / "params").symlink_to(folder / "params")
    values = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(values | changes))
    return copy


def test_bfloat16_round_trip_is_exact(saved):
    model, folder = saved
    again = registry.load(folder, dtype=jnp.bfloat16)
    assert again.format == "orbax" and again.config == model.config
    assert jax.tree.map(lambda x: x.dtype, again.params) == jax.tree.map(lambda x: x.dtype, model.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))


def test_a_tied_head_is_stored_once(saved):
    _, folder = saved
    assert not [path for path in folder.rglob("*") if "head" in path.name]


def test_the_dtype_is_converted_on_request(saved):
    model, folder = saved
    again = registry.load(folder, dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(again.params)} == {"float32"}
    np.testing.assert_array_equal(again.params["head"]["kernel"], model.params["head"]["kernel"].astype(jnp.float32))


def test_an_untied_model_from_gguf_with_rope_divisors(tmp_path):
    model = registry.load(write_gguf(tmp_path / "m.gguf", "llama"))
    registry.save(tmp_path / "ckpt", model)
    again = registry.load(tmp_path / "ckpt")
    assert again.config == model.config and isinstance(again.config.rope_scaling, tuple)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))


def test_a_directory_that_is_not_empty_is_left_alone(saved, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ModelError, match="is not empty"):
        registry.save(tmp_path, saved[0])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_parameters_that_do_not_fit_are_listed(saved, tmp_path):
    copy = _edit(saved[1], tmp_path / "copy", mlp_dim=94, tied_embeddings=False)
    with pytest.raises(ModelError) as error:
        registry.load(copy)
    assert "head.kernel is missing and should be (70, 157)" in str(error.value)
    assert "layers.mlp.up.kernel is (4, 70, 93) and should be (4, 70, 94)" in str(error.value)


def test_parameters_that_the_configuration_lacks_are_listed(saved, tmp_path):
    copy = _edit(saved[1], tmp_path / "copy", qkv_bias=False)
    with pytest.raises(ModelError, match=r"layers.attn.q.bias is \(4, 5, 14\) and should be absent"):
        registry.load(copy)


def test_another_version_or_an_incomplete_directory_is_refused(saved, tmp_path):
    with pytest.raises(ModelError, match="was not written by this version"):
        registry.load(_edit(saved[1], tmp_path / "copy", skg_jax=99))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((saved[1] / "config.json").read_text())
    with pytest.raises(ModelError, match="lacks params/"):
        registry.load(tmp_path / "empty")
