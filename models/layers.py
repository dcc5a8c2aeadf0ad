"""The modules of one decoder layer, authored in flax.nnx; `models.decoder` runs them stacked under one scan.

They declare shapes and computation. Values and their dtype come from a file, or from `decoder.init`.

Kernels are laid out `[in, out]`: a scan over stacked `[L, in, out]` float32 weights reads them 2.5 times faster on CPU
than `[L, out, in]`, the layout of the files.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.rope import rotate

# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], carry) -> (out [B,T,N,H], carry, y); q and k are already rotated.
LayerAttend = Callable[[Array, Array, Array, Any], tuple[Array, Any, Any]]


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), computed in float32; the scale is applied in the model's dtype."""

    def __init__(self, config: ModelConfig):
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones(config.embed_dim))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(x, self.scale[...], self.eps)


def rms_norm(x: Float[Array, "B T D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "B T D"]:
    """`x / rms(x) * scale` over the last axis."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


class Linear(nnx.Module):
    """A kernel `[*inputs, *outputs]`, an optional bias `[*outputs]`, and the einsum that applies it."""

    def __init__(self, equation: str, shape: tuple[int, ...], bias: tuple[int, ...] | None):
        self.equation = equation
        self.kernel = nnx.Param(jnp.zeros(shape))
        if bias is not None:
            self.bias = nnx.Param(jnp.zeros(bias))

    def __call__(self, x: Array) -> Array:
        y = jnp.einsum(self.equation, x, self.kernel[...])
        return y + self.bias[...] if hasattr(self, "bias") else y


class Attention(nnx.Module):
    """Projections around an attention that is given at the call: the module knows no cache and no policy."""

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim

        def into(heads):
            return Linear("BTD,DNH->BTNH", (D, heads, H), (heads, H) if config.qkv_bias else None)

        self.q, self.k, self.v = into(N), into(K), into(K)
        self.o = Linear("BTNH,NHD->BTD", (N, H, D), None)

    def __call__(self, x: Float[Array, "B T D"], cos, sin, attend: LayerAttend, carry):
        q, k, v = self.q(x), self.k(x), self.v(x)
        out, carry, y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, carry)
        return self.o(out), carry, y


class MLP(nnx.Module):
    """Gated feed-forward network with SiLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        D, F = config.embed_dim, config.mlp_dim
        self.gate = Linear("BTD,DF->BTF", (D, F), None)
        self.up = Linear("BTD,DF->BTF", (D, F), None)
        self.down = Linear("BTF,FD->BTD", (F, D), None)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: attention, then the feed-forward network."""

    def __init__(self, config: ModelConfig):
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    def __call__(self, x: Float[Array, "B T D"], cos, sin, attend: LayerAttend, carry):
        with jax.named_scope("attention"):
            out, carry, y = self.attn(self.attn_norm(x), cos, sin, attend, carry)
        x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), carry, y
