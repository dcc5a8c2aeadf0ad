"""What a decoder computes, and nothing else: one frozen, hashable description per model.

A configuration attribute that is neither understood nor known to be harmless is refused by name: an ignored
`rope_scaling` gives fluent short answers and nonsense at 16K tokens.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.errors import ModelError

ARCHITECTURES = ("llama", "qwen2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """RoPE scaling by frequency bands, as published with Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        if self.factor < 1:
            raise ModelError(f"rope factor is {self.factor}, but must be at least 1.")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelError(
                f"rope low_freq_factor {self.low_freq_factor} must be positive and below "
                f"high_freq_factor {self.high_freq_factor}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of one of `ARCHITECTURES`; a tuple as `rope_scaling` (GGUF) holds a divisor for each frequency."""

    architecture: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | tuple[float, ...] | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    tied_embeddings: bool = False
    max_context: int = 2048

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture is {self.architecture!r}, but only {' and '.join(ARCHITECTURES)} are implemented."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and not value > 0:
                raise ModelError(f"{field.name} is {value}, but must be positive.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, but RoPE needs an even number.")
        if isinstance(self.rope_scaling, tuple) and len(self.rope_scaling) != self.head_dim // 2:
            raise ModelError(f"rope_scaling has {len(self.rope_scaling)} divisors, but head_dim // 2 are needed.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`; raises `ModelError` on a field that does not exist or is missing."""
        values = dict(values)
        scaling = values.get("rope_scaling")
        if isinstance(scaling, Mapping):
            values["rope_scaling"] = Llama3Scaling(**scaling)
        elif scaling is not None:
            values["rope_scaling"] = tuple(scaling)
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"The model configuration does not fit this version: {error}.") from error

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """From a Hugging Face `config.json`; raises `ModelError` on whatever would change the computation unseen."""
        from models.loading import hf_config

        return cls(**hf_config.fields(values))

    @classmethod
    def from_gguf(cls, reader) -> "ModelConfig":
        """From an open `gguf.GGUFReader`; raises `ModelError` on whatever would change the computation unseen."""
        from models.loading import gguf_metadata

        return cls(**gguf_metadata.fields(reader))
