"""Configurations are understood completely or refused by name."""

import dataclasses
import json

import pytest

from models import published
from models.config import Llama3Scaling, ModelConfig
from models.errors import ModelError
from tests.golden import tiny

LLAMA, QWEN = tiny.CONFIGS["llama"], tiny.CONFIGS["qwen2"]
SCALING = LLAMA["rope_scaling"]


def test_every_field_of_a_hugging_face_config():
    assert ModelConfig.from_hf(LLAMA) == ModelConfig(
        architecture="llama",
        vocab_size=211,
        embed_dim=54,
        mlp_dim=87,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=18,
        rope_theta=10000.0,
        rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64),
        norm_eps=1e-5,
        qkv_bias=False,
        tied_embeddings=False,
        max_context=512,
    )


def test_what_a_silent_file_means():
    silent = {
        key: value
        for key, value in QWEN.items()
        if key not in ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "max_position_embeddings")
    }
    config = ModelConfig.from_hf(silent | {"head_dim": None})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (5, 14, 10_000.0)
    assert (config.tied_embeddings, config.max_context, config.qkv_bias) == (False, 32768, True)


def test_harmless_attributes_are_ignored():
    extra = {
        "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "bos_token_id": 1, "eos_token_id": [2, 3],
        "is_llama_config": True, "rope_interleaved": False, "attention_dropout": 0.0, "mlp_bias": False,
        "pretraining_tp": 1, "hidden_act": "silu", "transformers.js_config": {}, "use_cache": True,
    }  # fmt: skip
    assert ModelConfig.from_hf(LLAMA | extra) == ModelConfig.from_hf(LLAMA)
    window = {"sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False}
    assert ModelConfig.from_hf(QWEN | window) == ModelConfig.from_hf(QWEN)


@pytest.mark.parametrize(
    "extra",
    [
        {"quantization_config": {"bits": 4}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_interleaved": True},
        {"partial_rotary_factor": 0.5},
        {"num_experts": 8},
        {"never_heard_of": 1},
        {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0},
    ],
    ids=str,
)
def test_an_attribute_that_changes_the_computation_is_refused_by_name(extra):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_hf(LLAMA | extra)
    assert all(name in str(error.value) for name in extra)


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "longrope", "su"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_scalings_are_refused_by_name(kind, key):
    with pytest.raises(ModelError, match=kind):
        ModelConfig.from_hf(QWEN | {"rope_scaling": {key: kind, "factor": 4.0}})
    with pytest.raises(ModelError, match=kind):
        ModelConfig.from_hf(QWEN | {"rope_parameters": {key: kind, "factor": 4.0, "rope_theta": 1e6}})


def test_llama3_scaling_under_every_spelling():
    """`type`, `rope_type` and transformers 5's `rope_parameters` mean the same; so do both keys at once."""
    bands = {key: value for key, value in SCALING.items() if key != "rope_type"}
    bare = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    expected = ModelConfig.from_hf(LLAMA)
    for spelling in (
        {"rope_scaling": bands | {"type": "llama3"}, "rope_theta": 10000.0},
        {"rope_scaling": bands | {"type": "llama3", "rope_type": "llama3"}, "rope_theta": 10000.0},
        {"rope_parameters": SCALING | {"rope_theta": 10000.0}},
    ):
        assert ModelConfig.from_hf(bare | spelling) == expected


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 8.0},
        SCALING | {"attention_factor": 1.2},
        {key: value for key, value in SCALING.items() if key != "factor"},
        SCALING | {"type": "yarn"},
        SCALING | {"low_freq_factor": 4.0},
        SCALING | {"factor": 0.5},
    ],
    ids=str,
)
def test_incomplete_or_contradictory_scaling_is_refused(scaling):
    with pytest.raises(ModelError, match="rope"):
        ModelConfig.from_hf(LLAMA | {"rope_scaling": scaling})


def test_other_architectures_are_refused_by_name():
    with pytest.raises(ModelError, match="MistralForCausalLM"):
        ModelConfig.from_hf(LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    with pytest.raises(ModelError, match="LlamaForSequenceClassification"):
        ModelConfig.from_hf(LLAMA | {"architectures": ["LlamaForSequenceClassification"]})


def test_missing_attributes_are_listed_together():
    with pytest.raises(ModelError, match="lacks hidden_size, num_hidden_layers"):
        ModelConfig.from_hf({key: LLAMA[key] for key in LLAMA if key not in ("hidden_size", "num_hidden_layers")})


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_kv_heads", 4, "num_heads 6 must be a multiple of num_kv_heads 4"),
        ("head_dim", 17, "head_dim is 17"),
        ("num_layers", 0, "num_layers is 0"),
        ("norm_eps", 0.0, "norm_eps is 0.0"),
        ("rope_theta", float("nan"), "rope_theta is nan"),
        ("architecture", "gpt2", "architecture is 'gpt2'"),
        ("rope_scaling", [1.0, 2.0], "rope_scaling has 2 divisors"),
        ("surprise", 1, "surprise"),
    ],
)
def test_impossible_values_are_named(field, value, sentence):
    with pytest.raises(ModelError, match=sentence):
        ModelConfig.from_dict(ModelConfig.from_hf(LLAMA).to_dict() | {field: value})


@pytest.mark.parametrize("scaling", [None, "bands", tuple(float(i) for i in range(1, 10))])
def test_a_config_survives_json_and_is_hashable(scaling):
    config = ModelConfig.from_hf(LLAMA)
    if scaling != "bands":
        config = ModelConfig.from_dict(config.to_dict() | {"rope_scaling": scaling})
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_a_published_model_is_known_by_its_sizes_whatever_its_vocabulary_and_context():
    known = published.LLAMA_3_1_8B
    assert (
        published.name_of(dataclasses.replace(known, vocab_size=7, max_context=9, rope_scaling=None)) == "llama-3.1-8b"
    )
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "embed_dim", "mlp_dim"):
        assert published.name_of(dataclasses.replace(known, **{field: 2 * getattr(known, field)})) is None, field
