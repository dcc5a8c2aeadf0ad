"""Small random models that both sides of a comparison make from a seed, so that no weights are stored."""

import numpy as np

# Odd sizes; a head dimension that is not hidden_size / heads; texts longer than the unscaled context.
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 211,
        "hidden_size": 54,
        "intermediate_size": 87,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 18,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 157,
        "hidden_size": 70,
        "intermediate_size": 93,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
}

B, T = 2, 131
POSITIONS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 63, 64, 89, 110, 127, 128, 130]


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face checkpoint, in the order in which `weights` draws them."""
    D, F, N, K = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    H, V = config.get("head_dim") or D // N, config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part, heads in (("q", N), ("k", K), ("v", K)):
            found[f"{layer}.self_attn.{part}_proj.weight"] = (heads * H, D)
            if config["model_type"] == "qwen2":
                found[f"{layer}.self_attn.{part}_proj.bias"] = (heads * H,)
        found[f"{layer}.self_attn.o_proj.weight"] = (D, N * H)
        found |= {f"{layer}.mlp.{part}_proj.weight": (F, D) for part in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (D, F)
        found |= {f"{layer}.{part}_layernorm.weight": (D,) for part in ("input", "post_attention")}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, D)
    return found


def weights(name: str, seed: int = 20261130) -> dict[str, np.ndarray]:
    """float32 weights under their Hugging Face names: norms around one, biases and matrices around zero."""
    rng = np.random.default_rng(seed)
    values = {}
    for tensor, shape in shapes(CONFIGS[name]).items():
        noise = rng.standard_normal(shape)
        if "norm" in tensor:
            noise = 1 + 0.2 * noise
        elif not tensor.endswith("bias"):
            noise *= 1.5 / shape[-1] ** 0.5  # strong enough for peaked attention
        values[tensor] = noise.astype(np.float32)
    return values


def tokens(name: str, seed: int = 7) -> np.ndarray:
    """int32 `[B, T]` random tokens."""
    return np.random.default_rng(seed).integers(CONFIGS[name]["vocab_size"], size=(B, T), dtype=np.int32)
