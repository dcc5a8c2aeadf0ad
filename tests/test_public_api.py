"""`import skg_jax`: light, complete, and clear about names it does not have."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import skg_jax


def test_import_is_light():
    code = "import sys, skg_jax; print(sorted({'jax', 'jaxlib', 'numpy', 'flax'} & set(sys.modules)), dir(skg_jax))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("[] ")


@pytest.mark.parametrize("name", skg_jax.__all__)
def test_every_public_name_loads_from_its_module(name):
    value = getattr(skg_jax, name)
    assert value.__module__.startswith(f"skg_jax.{skg_jax._MODULES[name]}")
    assert value.__doc__


def test_the_three_lists_of_names_agree():
    tree = ast.parse(Path(skg_jax.__file__).read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("skg_jax.")
        for alias in node.names
    }
    assert typed == {name: f"skg_jax.{module}" for name, module in skg_jax._MODULES.items()}
    assert sorted(typed) == skg_jax.__all__


def test_dir_lists_what_has_not_been_loaded_yet():
    assert set(skg_jax.__all__) <= set(dir(skg_jax))


def test_unknown_name_is_refused_by_name():
    with pytest.raises(AttributeError, match="no public name 'Engin'.*Engine"):
        skg_jax.Engin  # noqa: B018
