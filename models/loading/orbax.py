"""Orbax checkpoint directories: `config.json` (ours), `params/` (orbax), and the tokenizer's files beside them."""

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import orbax.checkpoint as ocp

from models.config import ModelConfig
from models.decoder import Params, abstract, stacked
from models.errors import ModelError
from models.loading.huggingface import read_json

FORMAT = "skg_jax"  # the key of config.json that tells our directory from a Hugging Face folder
VERSION = 1


@runtime_checkable
class SavesTokenizer(Protocol):
    def save(self, folder: Path) -> None: ...


def save(folder: Path, config: ModelConfig, params: Params, tokenizer: SavesTokenizer | None = None) -> None:
    """Writes a self-contained directory; raises `ModelError` when it exists and is not empty."""
    folder = Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} is not empty; choose a new directory for the checkpoint.")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", _stored(config, params))
    if tokenizer is not None:
        tokenizer.save(folder)
    dtype = params["norm"]["scale"].dtype.name
    values = {FORMAT: VERSION, "dtype": dtype, **config.to_dict()}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _stored(config: ModelConfig, params: Params) -> Params:
    """Layers stacked; a tied head is a copy of the embedding, so it is not stored."""
    params = params | {"layers": stacked(params)}
    return {name: value for name, value in params.items() if name != "head" or not config.tied_embeddings}


def is_checkpoint(config: dict[str, Any]) -> bool:
    """Whether a parsed config.json is one that `save` wrote."""
    return FORMAT in config


def load(folder: Path, dtype=None) -> tuple[ModelConfig, Params]:
    """(config, params); `dtype` None keeps the stored one. Raises `ModelError`."""
    values = read_json(folder / "config.json")
    if values.pop(FORMAT, None) != VERSION:
        raise ModelError(f"{folder} was not written by this version's models.loading.orbax; save the model again.")
    stored = values.pop("dtype")
    config = ModelConfig.from_dict(values)
    wanted = _stored(config, abstract(config, stored))
    _check(folder, wanted)
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore((folder / "params").absolute(), _placed(wanted))
    params = jax.tree.map(lambda x: x.astype(dtype or stored), params)
    if config.tied_embeddings:
        params["head"] = {"kernel": params["embed"]["embedding"].T}
    return config, params


def _placed(tree: Params) -> Params:
    """The same abstract tree, every leaf on the default device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _check(folder: Path, wanted: Params) -> None:
    """Raises one `ModelError` that lists every missing, misshaped and unexpected parameter."""
    if not (folder / "params").is_dir():
        raise ModelError(f"{folder} lacks params/; the checkpoint is not complete.")
    with ocp.StandardCheckpointer() as checkpointer:
        found = _shapes(checkpointer.metadata((folder / "params").absolute()).item_metadata.tree)
    expected = _shapes(wanted)
    if found != expected:
        problems = [
            f"{name} is {found.get(name, 'missing')} and should be {expected.get(name, 'absent')}"
            for name in sorted(found.keys() | expected.keys())
            if found.get(name) != expected.get(name)
        ]
        raise ModelError(f"The parameters of {folder} do not fit its configuration: {'; '.join(problems)}.")


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}
