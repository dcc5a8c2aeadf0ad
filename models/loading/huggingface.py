"""Hugging Face folders: config.json beside one or several safetensors files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig
from models.decoder import Params
from models.errors import ModelError
from models.loading import table

_LAYER = "model.layers.{i}."
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
}

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises `ModelError` when the file is absent or no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; the folder is not complete, download it again.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object; download it again.")
    return values


def _files_of_tensors(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name as the index says, which is authoritative; None when there is no index."""
    if not (folder / INDEX).exists():
        return None
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ModelError(f"{folder / INDEX} has no weight_map; download it again.")
    absent = sorted({name for name in files.values() if not (folder / name).is_file()})
    if absent:
        raise ModelError(f"{folder} lacks {', '.join(absent)}, which its index names; download the folder again.")
    return files


class SafetensorsSource:
    """Tensors of a folder; one that the index does not assign to a file is not read from there."""

    def __init__(self, folder: Path):
        self.path = str(folder)
        assigned = _files_of_tensors(folder)
        names = sorted(set(assigned.values())) if assigned else ["model.safetensors"]
        self.files = {name: self._open(folder / name) for name in names}
        self.home: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, handle in self.files.items():
            for tensor in handle.keys():
                # A copy that the index places elsewhere is stale; a name that it lacks is reported as unexpected.
                if assigned is None or assigned.get(tensor, file) == file:
                    self.home[tensor] = file
                    self.shapes[tensor] = tuple(handle.get_slice(tensor).get_shape())

    @staticmethod
    def _open(path: Path):
        if not path.is_file():
            raise ModelError(f"{path} is missing; only safetensors weights can be read.")
        try:
            return safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ModelError(f"{path} is no safetensors file, truncated or damaged; download it again.") from error

    def read(self, name: str) -> np.ndarray:
        return self.files[self.home[name]].get_tensor(name)


def _ignored(source: SafetensorsSource, config: ModelConfig) -> set[str]:
    """Buffers that follow from the configuration, and a tied head that some files hold as a copy."""
    ignored = {name for name in source.shapes if name.endswith("rotary_emb.inv_freq")}
    head, embed = NAMES["head"], NAMES["embed"]
    if config.tied_embeddings and head in source.shapes and embed in source.shapes:
        if not np.array_equal(source.read(head), source.read(embed)):
            raise ModelError(f"{source.path} says tie_word_embeddings, but its {head} differs from {embed}.")
        ignored.add(head)
    return ignored


def load(folder: Path, dtype, progress: table.Progress | None = None) -> tuple[ModelConfig, Params]:
    """(config, params) of one folder; raises `ModelError`."""
    config = ModelConfig.from_hf(read_json(folder / "config.json"))
    source = SafetensorsSource(folder)
    slots = table.slots(config, NAMES)
    ignored = _ignored(source, config)
    return config, table.fill(source, config, slots, dtype=dtype, ignored=ignored, progress=progress)
