"""Llama and Qwen2 forward pass: one `lax.scan` over the layers, plain nested dicts across the jit boundary.

Parameters are `{"embed": {"embedding" [V,D]}, "layers": {...each leaf [L,...]}, "norm": {"scale" [D]},
"head": {"kernel" [D,V]}}`, or the same with `unstack`ed layers: a tuple of L dicts. Passing the dict costs about 70 us
per dispatch, `nnx.jit` of the same model 112 ms.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.config import ModelConfig
from models.layers import DecoderLayer, product, rms_norm
from models.rope import rotation

Params = dict[str, Any]

# (layer i32, q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], carry) -> (out [B,T,N,H], carry, y)
Attend = Callable[[Array, Array, Array, Array, Any], tuple[Array, Any, Any]]


@functools.lru_cache
def _layer(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """(structure, shapes without L) of one layer; allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: DecoderLayer(config)))
    return graph, nnx.to_pure_dict(state)


def abstract(config: ModelConfig, dtype=jnp.float32) -> Params:
    """The tree of parameters as `jax.ShapeDtypeStruct`s."""
    D, V, L = config.embed_dim, config.vocab_size, config.num_layers
    shapes = {
        "embed": {"embedding": (V, D)},
        "layers": jax.tree.map(lambda leaf: (L, *leaf.shape), _layer(config)[1]),
        "norm": {"scale": (D,)},
        "head": {"kernel": (D, V)},
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def init(config: ModelConfig, key: PRNGKeyArray, dtype=jnp.float32) -> Params:
    """Random parameters: normal(0, 0.02) kernels, zero biases, unit norms."""
    leaves, tree = jax.tree.flatten_with_path(abstract(config, dtype))
    # One draw for all: XLA takes a second to compile each.
    ends = list(itertools.accumulate(leaf.size for _, leaf in leaves))
    noise = 0.02 * jax.random.normal(key, (ends[-1],), dtype)
    constants = {"scale": jnp.ones, "bias": jnp.zeros}
    values = []
    for (path, leaf), end in zip(leaves, ends, strict=True):
        constant = constants.get(path[-1].key)
        drawn = noise[end - leaf.size : end].reshape(leaf.shape)
        values.append(drawn if constant is None else constant(leaf.shape, dtype))
    params = jax.tree.unflatten(tree, values)
    if config.tied_embeddings:
        params["head"] = {"kernel": params["embed"]["embedding"].T}
    return params


def unstack(params: Params) -> Params:
    """Gives every layer arrays of its own. On a CPU the loop then multiplies with them where they lie (docs/adr/0006).

    The stacked leaves are deleted on the way, so that a second copy of the model never exists.
    """

    def apart(leaf: Array) -> list[Array]:
        parts = jax.block_until_ready([leaf[i] for i in range(leaf.shape[0])])
        leaf.delete()
        return parts

    leaves, tree = jax.tree.flatten(params["layers"])
    each = zip(*(apart(leaf) for leaf in leaves), strict=True)
    return params | {"layers": tuple(jax.tree.unflatten(tree, layer) for layer in each)}


def stacked(params: Params, *path: str) -> Any:
    """The subtree `path` of all layers with leaves `[L, ...]`, whichever way they are kept."""
    find = lambda tree: functools.reduce(lambda node, part: node[part], path, tree)
    layers = params["layers"]
    if isinstance(layers, tuple):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(find(layer) for layer in layers))
    return find(layers)


def hidden_states(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    carry: Any,
    unroll: bool | None = None,
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Runs all layers. Returns (x after the final norm, carry, ys); `ys` stacks the `y` of every layer, `[L,...]`.

    `carry` goes through `attend` of layer 0, 1, ...: a cache held there is updated in place, whereas as an input and
    output of the scan it would be copied (256 ms against 74 ms a step in the prototype).

    Args:
      unroll: a Python loop over unstacked layers, in which `attend` gets its layer as an int. None: on an accelerator,
        where a scan would wait for the host at every switch (docs/adr/0006).
    """
    if unroll is None:
        unroll = isinstance(params["layers"], tuple) and jax.default_backend() != "cpu"
    cos, sin = rotation(config, positions)

    def body(state, layer):
        x, carry = state
        run = functools.partial(_with_layer, params["layers"], config, layer)
        q, k, v = run(DecoderLayer.before, x, cos, sin)
        with jax.named_scope("attention"):
            out, carry, y = attend(layer, q, k, v, carry)
        return (run(DecoderLayer.after, x, out), carry), y

    x = params["embed"]["embedding"][tokens]
    loop = _unrolled if unroll else jax.lax.scan
    (x, carry), ys = loop(body, (x, carry), jnp.arange(config.num_layers))
    return rms_norm(x, params["norm"]["scale"], config.norm_eps), carry, ys


def _unrolled(body, state, layers: Int[Array, " L"]):
    """`lax.scan` as a Python loop. (Its own `unroll` cuts the weights of all layers out of the stack first.)"""
    ys = []
    for i in range(layers.shape[0]):
        state, y = body(state, i)
        ys.append(y)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


def _with_layer(layers: Any, config: ModelConfig, layer: Any, half: Callable[..., Any], *args: Array) -> Any:
    """A half of one layer, with separate arrays of its own, those that a switch picks, or weights cut out of a stack.

    The switch is for a CPU, where it costs nothing; a GPU would wait 18 us for the host at each.
    """
    if isinstance(layer, int):
        return _shared(config, half, layers[layer], *args)
    use = lambda weights: half(nnx.merge(_layer(config)[0], weights), *args)
    if isinstance(layers, tuple):
        return jax.lax.switch(layer, [functools.partial(use, weights) for weights in layers])
    cut = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return use(jax.tree.map(cut, layers))  # leaves that `half` leaves alone are not cut


@functools.partial(jax.jit, static_argnums=(0, 1))
def _shared(config: ModelConfig, half: Callable[..., Any], weights: Params, *args: Array) -> Any:
    """A half of a layer, traced and lowered once for all unrolled layers; XLA puts it back in place of each call."""
    return half(nnx.merge(_layer(config)[0], weights), *args)


def unembed(params: Params, config: ModelConfig, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Logits in float32.

    A tied head is kept as a transposed copy of the embedding: the product takes 4 ms instead of 14 ms for SmolLM2.
    """
    del config  # tied or not, the head is a parameter of its own
    logits = product(x.reshape(-1, x.shape[-1]), params["head"]["kernel"], jnp.float32)
    return logits.reshape(*x.shape[:-1], -1)


def attend_dense(
    layer: Int[Array, ""],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    carry: Any,
) -> tuple[Float[Array, "B T N H"], Any, None]:
    """Causal attention among the given tokens alone, without a cache: the reference for tests and for scoring texts."""
    del layer  # the same in every layer
    B, T, N, H = q.shape
    grouped = q.reshape(B, T, k.shape[2], -1, H).astype(jnp.float32)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k.astype(jnp.float32)) / H**0.5
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores, axis=-1), v.astype(jnp.float32))
    return out.reshape(B, T, N, H).astype(q.dtype), carry, None
