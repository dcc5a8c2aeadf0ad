"""Hugging Face folders: shards, the index, stale copies, and what a folder may lack."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import registry
from models.errors import ModelError
from tests.golden import tiny
from tests.models.files import write_hf, write_shards

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
NORM = "model.norm.weight"


def _same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return registry.load(write_hf(tmp_path_factory.mktemp("hf"), "llama"))


def test_shards_give_the_same_parameters_as_one_file(tmp_path, whole):
    sharded = registry.load(write_shards(tmp_path, "llama"))
    assert sharded.format == "hf" and sharded.sha256 is None
    assert _same(sharded.params, whole.params)


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, "llama")
    (tmp_path / SECOND).unlink()
    with pytest.raises(ModelError, match=f"lacks {SECOND}"):
        registry.load(tmp_path)


def test_a_stale_copy_in_another_shard_is_not_read(tmp_path, whole):
    """The index decides where a tensor lives, whichever shard is opened last."""
    home = json.loads((write_shards(tmp_path / "plain", "llama") / INDEX).read_text())["weight_map"]
    stale = {
        file: {
            tensor: np.full_like(value, 99.0) for tensor, value in tiny.weights("llama").items() if home[tensor] != file
        }
        for file in (FIRST, SECOND)
    }
    assert all(stale.values())
    assert _same(registry.load(write_shards(tmp_path / "stale", "llama", stale)).params, whole.params)


def test_a_tensor_that_only_the_wrong_shard_holds_is_missing(tmp_path):
    write_shards(tmp_path, "llama")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"][NORM] = FIRST if index["weight_map"][NORM] == SECOND else SECOND
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"1 missing \(model.norm.weight\)"):
        registry.load(tmp_path)


def test_a_tensor_that_the_index_lacks_is_unexpected(tmp_path):
    write_shards(tmp_path, "llama", {FIRST: {"model.extra.weight": np.zeros(3, np.float32)}})
    with pytest.raises(ModelError, match=r"1 unexpected \(model.extra.weight\)"):
        registry.load(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path, index):
    write_shards(tmp_path, "llama")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelError, match=INDEX):
        registry.load(tmp_path)


def test_every_fault_of_the_tensors_in_one_message(tmp_path):
    tensors = tiny.weights("qwen2")
    del tensors["model.layers.3.self_attn.k_proj.bias"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(14, np.float32)
    tensors[NORM] = np.ones(71, np.float32)
    with pytest.raises(ModelError) as error:
        registry.load(write_hf(tmp_path, "qwen2", tensors=tensors))
    for part in (
        "1 missing (model.layers.3.self_attn.k_proj.bias)",
        "1 misshaped (model.norm.weight is (71,) and should be (70,))",
        "1 unexpected (model.layers.0.self_attn.q_norm.weight)",
    ):
        assert part in str(error.value)


def test_bfloat16_weights_keep_their_bits(tmp_path):
    tensors = {tensor: value.astype(ml_dtypes.bfloat16) for tensor, value in tiny.weights("llama").items()}
    params = registry.load(write_hf(tmp_path, "llama", tensors=tensors), dtype=ml_dtypes.bfloat16).params
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["model.embed_tokens.weight"])
    o = np.asarray(params["layers"]["attn"]["o"]["kernel"][1])
    np.testing.assert_array_equal(o.reshape(108, 54).T, tensors["model.layers.1.self_attn.o_proj.weight"])


def test_a_stored_copy_of_a_tied_head_is_accepted_and_another_head_is_not(tmp_path):
    tensors = tiny.weights("qwen2")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(7, np.float32)}
    head = registry.load(write_hf(tmp_path / "a", "qwen2", tensors=tensors | copy | buffers)).params["head"]["kernel"]
    np.testing.assert_array_equal(head, tensors["model.embed_tokens.weight"].T)
    copy["lm_head.weight"][0, 0] += 1
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        registry.load(write_hf(tmp_path / "b", "qwen2", tensors=tensors | copy))


def test_a_truncated_file_is_refused(tmp_path):
    write_hf(tmp_path, "llama")
    data = (tmp_path / "model.safetensors").read_bytes()
    for size in (4, 100, len(data) - 1):
        (tmp_path / "model.safetensors").write_bytes(data[:size])
        with pytest.raises(ModelError, match="truncated or damaged"):
            registry.load(tmp_path)


def test_other_weight_formats_are_refused(tmp_path):
    write_hf(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors"):
        registry.load(tmp_path)


def test_unsupported_configurations_stop_before_the_weights(tmp_path):
    write_hf(tmp_path, "qwen2", config={"rope_scaling": {"type": "yarn", "factor": 4.0}})
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="yarn"):
        registry.load(tmp_path)


def test_weights_reach_their_places(tmp_path, whole):
    tensors = load_file(whole.path / "model.safetensors")
    layer = whole.params["layers"]
    q, k = tensors["model.layers.2.self_attn.q_proj.weight"], tensors["model.layers.2.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(layer["attn"]["q"]["kernel"][2, :, 4], q[4 * 18 : 5 * 18].T)
    np.testing.assert_array_equal(layer["attn"]["k"]["kernel"][2, :, 1], k[18:36].T)
    np.testing.assert_array_equal(layer["mlp"]["down"]["kernel"][0], tensors["model.layers.0.mlp.down_proj.weight"].T)
    save_file(tensors | {NORM: 2 * tensors[NORM]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((whole.path / "config.json").read_text())
    np.testing.assert_array_equal(registry.load(tmp_path).params["norm"]["scale"], 2 * whole.params["norm"]["scale"])
