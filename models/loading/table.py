"""One table from the tensors of a file to our parameters, and the one loop that fills them.

Both file formats store a matrix `[out, in]`; ours are `[in, out]` with the heads as an axis of their own.
"""

import concurrent.futures
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.decoder import Params
from models.errors import ModelError

# (bytes loaded, bytes in all)
Progress = Callable[[int, int], None]


@runtime_checkable
class Source(Protocol):
    """An open file or folder of named tensors; shapes and values are row-major, matrices `[out, in]`."""

    path: str
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray: ...


class Slot(NamedTuple):
    """Where a parameter comes from: `{i}` in `name` is the layer; `heads` splits the output (or, of `o`, the input)."""

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]


def slots(config: ModelConfig, names: Mapping[str, str]) -> list[Slot]:
    """Every tensor that `config` needs, under the names of one file format."""
    D, F, H, N, K = config.embed_dim, config.mlp_dim, config.head_dim, config.num_heads, config.num_kv_heads
    heads = {"q": N, "k": K, "v": K}
    table = [
        Slot(("embed", "embedding"), names["embed"], (config.vocab_size, D), _keep),
        Slot(("norm", "scale"), names["norm"], (D,), _keep),
        Slot(("layers", "attn_norm", "scale"), names["attn_norm"], (D,), _keep),
        Slot(("layers", "mlp_norm", "scale"), names["mlp_norm"], (D,), _keep),
        Slot(("layers", "attn", "o", "kernel"), names["o"], (D, N * H), lambda w: w.T.reshape(N, H, D)),
        Slot(("layers", "mlp", "gate", "kernel"), names["gate"], (F, D), np.transpose),
        Slot(("layers", "mlp", "up", "kernel"), names["up"], (F, D), np.transpose),
        Slot(("layers", "mlp", "down", "kernel"), names["down"], (D, F), np.transpose),
    ]
    for part, count in heads.items():
        table.append(Slot(("layers", "attn", part, "kernel"), names[part], (count * H, D), _into_heads(count)))
        if config.qkv_bias:
            bias = names[part].removesuffix("weight") + "bias"
            table.append(Slot(("layers", "attn", part, "bias"), bias, (count * H,), _into_heads(count)))
    if not config.tied_embeddings:
        table.append(Slot(("head", "kernel"), names["head"], (config.vocab_size, D), np.transpose))
    return table


def _keep(w: np.ndarray) -> np.ndarray:
    return w


def _into_heads(count: int) -> Callable[[np.ndarray], np.ndarray]:
    """`[heads*H, D]` -> `[D, heads, H]`, or a bias `[heads*H]` -> `[heads, H]`."""
    return lambda w: w.T.reshape(*w.shape[1:], count, -1)


def _names(slot: Slot, config: ModelConfig) -> list[str]:
    return [slot.name.format(i=i) for i in range(config.num_layers if slot.path[0] == "layers" else 1)]


def check(source: Source, config: ModelConfig, table: list[Slot], ignored: set[str]) -> None:
    """Raises one `ModelError` that lists every missing, misshaped and unexpected tensor."""
    wanted = {name: slot.shape for slot in table for name in _names(slot, config)}
    found = source.shapes
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "misshaped": [
            f"{name} is {found[name]} and should be {shape}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
        "unexpected": sorted(found.keys() - wanted.keys() - ignored),
    }
    if any(problems.values()):
        lists = [f"{len(items)} {kind} ({', '.join(items)})" for kind, items in problems.items() if items]
        raise ModelError(f"The tensors of {source.path} do not fit its configuration: {'; '.join(lists)}.")


def fill(
    source: Source,
    config: ModelConfig,
    table: list[Slot],
    *,
    dtype: Any,
    ignored: set[str],
    progress: Progress | None = None,
) -> Params:
    """Reads every slot, stacks layers, casts to `dtype`; one parameter at a time, so that host memory stays small."""
    check(source, config, table, ignored)
    params: Params = {}
    total = sum(int(np.prod(slot.shape)) * len(_names(slot, config)) for slot in table) * jnp.dtype(dtype).itemsize
    done = 0
    # Dequantising is bound by memory: more threads than this take longer than one (8 s against 3 s on two cores).
    workers = max(1, (os.cpu_count() or 1) // 2)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for slot in table:
            value = jax.device_put(_stack(source, slot, _names(slot, config), jnp.dtype(dtype), pool))
            _put(params, slot.path, value)
            done += value.nbytes
            if progress:
                progress(done, total)
    if config.tied_embeddings:
        params["head"] = {"kernel": params["embed"]["embedding"].T}
    return params


def _stack(source: Source, slot: Slot, names: list[str], dtype: np.dtype, pool) -> np.ndarray:
    """One parameter, `[L, ...]` for those of a layer, from tensors that are read and converted in parallel."""
    stacked = slot.path[0] == "layers"
    shape = slot.convert(np.broadcast_to(np.zeros((), dtype), slot.shape)).shape
    out = np.empty((len(names), *shape), dtype)

    def read(i: int) -> None:
        out[i] = slot.convert(source.read(names[i]))

    list(pool.map(read, range(len(names))))
    return out if stacked else out[0]


def _put(tree: Params, path: tuple[str, ...], value: jax.Array) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
