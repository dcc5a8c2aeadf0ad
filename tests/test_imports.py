"""The import contracts of pyproject.toml hold, and each of them notices what it is there for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources, to break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("skg_jax", "models", "eval"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_are_kept(copy):
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    "file, line, message",
    [
        ("skg_jax/types.py", "import skg_jax.stats", "skg_jax.types is not allowed to import skg_jax.stats"),
        ("skg_jax/kv/__init__.py", "import skg_jax.selectors", "skg_jax.kv is not allowed to import"),
        ("skg_jax/stats/__init__.py", "import models", "skg_jax.stats is not allowed to import models"),
        ("skg_jax/attention.py", "import eval", "skg_jax.attention is not allowed to import eval"),
        ("models/__init__.py", "import skg_jax.attention", "models is not allowed to import skg_jax.attention"),
        ("models/__init__.py", "import skg_jax.stats", "models is not allowed to import skg_jax.stats"),
        ("skg_jax/nowhere.py", "", "skg_jax.nowhere"),
    ],
)
def test_a_broken_contract_is_reported(copy, file, line, message):
    with (copy / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    assert message in " ".join(result.stdout.split())
