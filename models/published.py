"""Sizes of published models, by name: what a benchmark without weights needs to know of them."""

from models.config import Llama3Scaling, ModelConfig
from models.errors import ModelError

LLAMA_3_1_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    embed_dim=4096,
    mlp_dim=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500_000.0,
    rope_scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
    norm_eps=1e-5,
    max_context=131_072,
)

_CONFIGS = {"llama-3.1-8b": LLAMA_3_1_8B}
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "embed_dim", "mlp_dim")


def name_of(config: ModelConfig) -> str | None:
    """The published model whose layers have the same sizes, whatever its weights are called; None if there is none."""
    sizes = lambda known: [getattr(known, field) for field in _SIZES]
    return next((name for name, known in _CONFIGS.items() if sizes(known) == sizes(config)), None)


def get(name: str) -> ModelConfig:
    """The configuration of a published model; raises `ModelError` with the names there are."""
    if name not in _CONFIGS:
        raise ModelError(f"there is no configuration {name!r}; choose one of {', '.join(_CONFIGS)}.")
    return _CONFIGS[name]
