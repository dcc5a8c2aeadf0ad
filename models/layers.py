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
    """From axes `inputs` to axes `outputs`: a kernel `[*inputs, *outputs]` and an optional bias `[*outputs]`."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, bias: bool = False):
        self.outputs = outputs
        self.kernel = nnx.Param(jnp.zeros(inputs + outputs))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        # As one matrix: of an einsum over several axes XLA would transpose the kernel first, in every step.
        rows = x.reshape(*x.shape[:2], -1)
        y = rows @ self.kernel[...].reshape(rows.shape[-1], -1)
        y = y.reshape(*x.shape[:2], *self.outputs)
        return y + self.bias[...] if hasattr(self, "bias") else y


class Attention(nnx.Module):
    """Projections around an attention that is given at the call: the module knows no cache and no policy."""

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.q, self.k, self.v = (Linear((D,), (heads, H), bias=config.qkv_bias) for heads in (N, K, K))
        self.o = Linear((N, H), (D,))

    def __call__(self, x: Float[Array, "B T D"], cos, sin, attend: LayerAttend, carry):
        q, k, v = self.q(x), self.k(x), self.v(x)
        out, carry, y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, carry)
        return self.o(out), carry, y


class MLP(nnx.Module):
    """Gated feed-forward network with SiLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        D, F = config.embed_dim, config.mlp_dim
        self.gate = Linear((D,), (F,))
        self.up = Linear((D,), (F,))
        self.down = Linear((F,), (D,))

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
