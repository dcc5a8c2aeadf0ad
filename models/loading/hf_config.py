"""Hugging Face `config.json` -> fields of `ModelConfig`.

Every attribute is handled, explicitly ignored, or equal to the one value that this package computes.
"""

from collections.abc import Mapping
from typing import Any

from models.config import Llama3Scaling
from models.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

# What transformers takes when the file is silent.
DEFAULT_CONTEXT = {"llama": 2048, "qwen2": 32768}

REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}

HANDLED = set(REQUIRED) | {
    "model_type", "architectures", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
    "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "sliding_window", "max_window_layers",
    "layer_types",
}  # fmt: skip

# Bookkeeping and training only: none of these changes a forward pass.
IGNORED = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torch_dtype",
    "dtype", "transformers_version", "transformers.js_config", "is_llama_config", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "attention_dropout", "id2label", "label2id",
    "problem_type", "return_dict", "output_attentions", "output_hidden_states", "torchscript", "finetuning_task",
    "task_specific_params", "tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id",
    "chunk_size_feed_forward", "use_mrope", "auto_map", "license", "model_max_length",
}  # fmt: skip

# Accepted only at the value that leaves the computation as it is.
NEUTRAL = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "use_bfloat16": False,
    "quantization_config": None,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
}

LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ModelConfig`; raises `ModelError` naming every attribute that it cannot honour."""
    architecture = values.get("model_type")
    if architecture not in ARCHITECTURES or values.get("architectures", None) not in (
        None,
        [ARCHITECTURES[architecture]],
    ):
        raise ModelError(
            f"config.json describes {values.get('architectures') or architecture}, but only "
            f"{' and '.join(ARCHITECTURES.values())} are implemented."
        )
    _refuse_unknown(values, architecture)
    missing = [name for name in REQUIRED if values.get(name) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}; take the file from the model's repository again.")
    theta, scaling = _rope(values)
    heads = values["num_attention_heads"]
    return {ours: values[theirs] for theirs, ours in REQUIRED.items()} | dict(
        architecture=architecture,
        num_kv_heads=_or(values.get("num_key_value_heads"), heads),
        head_dim=_or(values.get("head_dim"), values["hidden_size"] // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=values.get("rms_norm_eps", 1e-6),
        qkv_bias=architecture == "qwen2",
        tied_embeddings=values.get("tie_word_embeddings", False),
        max_context=values.get("max_position_embeddings", DEFAULT_CONTEXT[architecture]),
    )


def _or(value, default):
    return default if value is None else value


def _refuse_unknown(values: Mapping[str, Any], architecture: str) -> None:
    bad = [name for name in values if name not in HANDLED | IGNORED | set(NEUTRAL)]
    bad += [f"{name}={values[name]!r}" for name, neutral in NEUTRAL.items() if values.get(name, neutral) != neutral]
    # Qwen2 files name a window that `use_sliding_window: false` switches off; Llama has no such switch.
    if architecture == "llama" and values.get("sliding_window") is not None:
        bad.append(f"sliding_window={values['sliding_window']!r}")
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        bad.append(f"layer_types={sorted(set(values['layer_types']))!r}")
    if bad:
        raise ModelError(f"config.json asks for what is not implemented: {', '.join(bad)}.")


def _rope(values: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling), from `rope_scaling` with `type` or `rope_type`, or from transformers 5's `rope_parameters`."""
    rope = dict(values.get("rope_scaling") or {}) | dict(values.get("rope_parameters") or {})
    theta = _or(rope.pop("rope_theta", None), _or(values.get("rope_theta"), 10_000.0))
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope}
    kind = kinds.pop() if len(kinds) == 1 else sorted(kinds) or "default"
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json asks for a partial_rotary_factor, which is not implemented.")
    if kind == "default" and not rope:
        return theta, None
    if kind != "llama3":
        raise ModelError(f"config.json asks for rope scaling {kind!r} {rope}, but only 'llama3' is implemented.")
    if set(rope) != set(LLAMA3):
        raise ModelError(f"rope scaling 'llama3' needs exactly {sorted(LLAMA3)}, but config.json has {sorted(rope)}.")
    return theta, Llama3Scaling(**{ours: rope[theirs] for theirs, ours in LLAMA3.items()})
