"""The modules of one decoder layer, authored in flax.nnx; `models.decoder` runs all layers in one scan.

They declare shapes and computation. Values and their dtype come from a file, or from `decoder.init`.

Kernels are laid out `[in, out]`: a scan over stacked `[L, in, out]` float32 weights reads them 2.5 times faster on CPU
than `[L, out, in]`, the layout of the files.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.rope import rotate

LEAST_ROWS = 8

type QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]


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
        rows = x.reshape(x.shape[0] * x.shape[1], -1)
        y = product(rows, self.kernel[...].reshape(rows.shape[-1], -1))
        y = y.reshape(*x.shape[:2], *self.outputs)
        return y + self.bias[...] if hasattr(self, "bias") else y


def product(rows: Float[Array, "R D"], kernel: Float[Array, "D F"], dtype=None) -> Float[Array, "R F"]:
    """`rows @ kernel`. On an accelerator `LEAST_ROWS` or more take part: fewer go a slower way (docs/adr/0006)."""
    missing = LEAST_ROWS - rows.shape[0]
    if missing <= 0 or jax.default_backend() == "cpu":
        return jnp.matmul(rows, kernel, preferred_element_type=dtype)
    padded = jax.lax.optimization_barrier(jnp.pad(rows, ((0, missing), (0, 0))))  # or XLA takes the zeros out again
    return jnp.matmul(padded, kernel, preferred_element_type=dtype)[:-missing]


class Attention(nnx.Module):
    """Projections before and after an attention that is none of the module's business: no cache, no policy."""

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.q, self.k, self.v = (Linear((D,), (heads, H), bias=config.qkv_bias) for heads in (N, K, K))
        self.o = Linear((N, H), (D,))

    def __call__(self, x: Float[Array, "B T D"], cos, sin) -> QKV:
        return rotate(self.q(x), cos, sin), rotate(self.k(x), cos, sin), self.v(x)


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
    """Pre-norm residual layer in two halves: what comes before attention, and what comes after it."""

    def __init__(self, config: ModelConfig):
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    @jax.named_scope("qkv")
    def before(self, x: Float[Array, "B T D"], cos, sin) -> QKV:
        """Queries, keys and values of the normed input, rotated."""
        return self.attn(self.attn_norm(x), cos, sin)

    @jax.named_scope("mlp")
    def after(self, x: Float[Array, "B T D"], out: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The layer's output, from its input and the attention's output."""
        x = x + self.attn.o(out)
        return x + self.mlp(self.mlp_norm(x))
