"""GGUF metadata -> fields of `ModelConfig`; an `{arch}.*` key that is not understood is refused by name."""

from typing import Any

import gguf

from models.errors import ModelError

REQUIRED = {
    "block_count": "num_layers",
    "embedding_length": "embed_dim",
    "feed_forward_length": "mlp_dim",
    "attention.head_count": "num_heads",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "context_length": "max_context",
}

HANDLED = set(REQUIRED) | {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
    "rope.dimension_count", "vocab_size",
}  # fmt: skip

# Accepted only at the value that leaves the computation as it is.
NEUTRAL = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "logit_scale": 1.0,
}


def fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Arguments of `ModelConfig` from an open file; raises `ModelError` naming what it cannot honour."""
    metadata = {name: field for name, field in reader.fields.items()}
    architecture = _contents(metadata, "general.architecture")
    if architecture not in ("llama", "qwen2"):
        raise ModelError(f"The GGUF file holds a {architecture!r} model, but only llama and qwen2 are implemented.")
    if _contents(metadata, "split.count", 1) != 1:
        raise ModelError("The GGUF file is one part of several; merge the parts with llama-gguf-split --merge first.")
    values = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    _refuse_unknown(values)
    missing = [f"{architecture}.{name}" for name in REQUIRED if name not in values]
    if missing:
        raise ModelError(f"The GGUF file lacks {', '.join(missing)}; it is damaged or of another kind.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError("The GGUF file lacks token_embd.weight; a vocabulary without weights cannot be run.")
    heads = values["attention.head_count"]
    head_dim = values.get("attention.key_length", values["embedding_length"] // heads)
    _check_head_dim(values, head_dim)
    return {ours: values[theirs] for theirs, ours in REQUIRED.items()} | dict(
        architecture=architecture,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),  # ggml order: (D, V)
        num_kv_heads=values.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=values.get("rope.freq_base", 10_000.0),
        rope_scaling=_rope_divisors(tensors),
        qkv_bias=architecture == "qwen2",
        tied_embeddings="output.weight" not in tensors,
    )


def _contents(metadata, name, default=None):
    return metadata[name].contents() if name in metadata else default


def _refuse_unknown(values: dict[str, Any]) -> None:
    bad = [f"{name}={str(values[name])[:40]}" for name in values if name not in HANDLED | set(NEUTRAL)]
    bad += [f"{name}={values[name]!r}" for name, neutral in NEUTRAL.items() if values.get(name, neutral) != neutral]
    bad += [f"{name} per layer" for name in values if name in HANDLED and isinstance(values[name], list)]
    if bad:
        raise ModelError(f"The GGUF file asks for what is not implemented: {', '.join(bad)}.")


def _check_head_dim(values: dict[str, Any], head_dim: int) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        if values.get(name, head_dim) != head_dim:
            raise ModelError(f"{name} is {values[name]}, but only the head dimension {head_dim} is implemented.")


def _rope_divisors(tensors) -> tuple[float, ...] | None:
    """Llama 3's scaling is stored as a tensor of divisors, not as metadata."""
    if "rope_freqs.weight" not in tensors:
        return None
    return tuple(float(value) for value in tensors["rope_freqs.weight"].data)
