"""GGUF files: names, permutation, scaling, and every way in which a file can be wrong."""

import gguf
import numpy as np
import pytest

from models import registry
from models.errors import ModelError
from models.loading.gguf_reader import open_reader
from tests import golden
from tests.golden import tiny
from tests.models import run
from tests.models.files import add_value, finish, gguf_tensors, write_gguf


def _worst(path, name) -> float:
    """The largest difference from transformers' logits."""
    model = registry.load(path)
    found = np.asarray(run.logits(model.params, model.config, tiny.tokens(name)))
    return float(np.abs(found[:, tiny.POSITIONS] - golden.tiny_logits(name)).max())


def test_llama_has_permuted_weights_and_scaling_as_a_tensor(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama")
    config = registry.load(path).config
    assert isinstance(config.rope_scaling, tuple) and len(config.rope_scaling) == 9
    assert config.rope_scaling[0] == 1.0 and config.rope_scaling[-1] == 8.0
    assert (config.head_dim, config.tied_embeddings) == (18, False)
    assert _worst(path, "llama") < 1e-4


def test_qwen2_is_not_permuted_and_needs_no_key_length(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen2")
    config = registry.load(path).config
    assert (config.head_dim, config.tied_embeddings, config.qkv_bias) == (14, True, True)
    assert _worst(path, "qwen2") < 1e-4


@pytest.mark.parametrize("fault", ["not permuted", "no rope_freqs"])
def test_the_comparison_notices_the_two_traps(tmp_path, fault):
    """Negative control: weights in the other order, or without the divisors, give other logits."""
    tensors = gguf_tensors("llama")
    if fault == "no rope_freqs":
        del tensors["rope_freqs.weight"]
    else:
        tensors["blk.1.attn_q.weight"] = tiny.weights("llama")["model.layers.1.self_attn.q_proj.weight"]
    assert _worst(write_gguf(tmp_path / "m.gguf", "llama", tensors=tensors), "llama") > 0.01


def test_a_type_of_weights_that_cannot_be_read_is_named(tmp_path):
    tensors = gguf_tensors("llama") | {"output_norm.weight": np.ones(54, np.int32)}
    with pytest.raises(ModelError, match="stores output_norm.weight as I32"):
        registry.load(write_gguf(tmp_path / "m.gguf", "llama", tensors=tensors))


def test_every_fault_of_the_tensors_in_one_message(tmp_path):
    tensors = gguf_tensors("llama")
    del tensors["blk.0.attn_q.weight"], tensors["blk.2.ffn_norm.weight"]
    tensors["blk.1.attn_q.bias"] = np.zeros(108, np.float32)
    tensors["blk.1.ffn_up.weight"] = np.zeros((87, 53), np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors=tensors)
    with pytest.raises(ModelError) as error:
        registry.load(path)
    message = str(error.value)
    assert "2 missing (blk.0.attn_q.weight, blk.2.ffn_norm.weight)" in message
    assert "1 unexpected (blk.1.attn_q.bias)" in message
    assert "1 misshaped (blk.1.ffn_up.weight is (87, 53) and should be (87, 54))" in message


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "rope.scaling.factor=4.0"),
        ({"expert_count": 8}, "expert_count=8"),
        ({"attention.sliding_window": 4096}, "attention.sliding_window=4096"),
        ({"never_heard_of": 1}, "never_heard_of=1"),
        ({"attention.head_count_kv": [2, 2, 1]}, "attention.head_count_kv per layer"),
        ({"rope.dimension_count": 10}, "rope.dimension_count is 10"),
        ({"attention.value_length": 10}, "attention.value_length is 10"),
        ({"block_count": None, "attention.head_count": None}, "lacks llama.block_count, llama.attention.head_count"),
    ],
    ids=str,
)
def test_metadata_that_changes_the_computation_is_refused_by_name(tmp_path, metadata, sentence):
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata=metadata)
    with pytest.raises(ModelError) as error:
        registry.load(path)
    assert sentence in str(error.value)


def test_neutral_metadata_is_accepted(tmp_path):
    metadata = {"rope.scaling.type": "none", "expert_count": 0, "rope.dimension_count": 18, "vocab_size": 211}
    assert registry.load(write_gguf(tmp_path / "m.gguf", "llama", metadata=metadata)).config.num_layers == 3


def test_another_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="'gemma3'"):
        registry.load(write_gguf(tmp_path / "m.gguf", "llama", architecture="gemma3"))


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 0.3, 0.9, -29])
def test_a_truncated_file_is_refused(tmp_path, keep):
    """Cut in the header, in the metadata, among the tensors, and a byte before its end (28 are padding)."""
    whole = write_gguf(tmp_path / "whole.gguf", "llama").read_bytes()
    cut = whole[: int(keep * len(whole)) if isinstance(keep, float) else keep]
    (tmp_path / "cut.gguf").write_bytes(cut)
    with pytest.raises(ModelError, match="cut.gguf is no GGUF file, truncated or damaged"):
        registry.load(tmp_path / "cut.gguf")


def test_a_vocabulary_is_no_model(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors={"rope_freqs.weight": np.ones(9, np.float32)})
    with pytest.raises(ModelError, match="lacks token_embd.weight"):
        registry.load(path)


def test_the_reader_reads_what_the_library_reads(tmp_path):
    """Our reader takes arrays in one piece; every kind of value must come out as from `gguf.GGUFReader`."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "a.strings": ["", "é", "日本", "x" * 300],
        "a.ints": [3, -1, 2**31 - 1],
        "a.floats": [0.5, -1e30],
        "a.bools": [True, False, True],
        "a.nested": [[1, 2], [3, 4]],
        "a.text": "one",
        "a.number": 7,
        "a.flag": True,
        "a.real": 0.25,
    }
    for key, value in values.items():
        add_value(writer, key, value)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    path = finish(writer, tmp_path / "m.gguf")
    ours, theirs = open_reader(path), gguf.GGUFReader(path)
    assert {k: f.contents() for k, f in ours.fields.items()} == {k: f.contents() for k, f in theirs.fields.items()}
    assert ours.fields["a.strings"].contents() == values["a.strings"]
    np.testing.assert_array_equal(ours.tensors[0].data, theirs.tensors[0].data)
