"""Where compiled programs are kept, and how to say otherwise."""

from __future__ import annotations

import jax
import pytest

from skg_jax.engine import compile_cache


@pytest.fixture(autouse=True)
def unset(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_users_cache_folder_is_the_default(tmp_path):
    folder = tmp_path / "cache" / "skg_jax" / "compiled"
    assert compile_cache.enable() == folder and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_a_variable_names_another_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "a" / "b"))
    assert compile_cache.enable() == tmp_path / "a" / "b"


def test_it_can_be_turned_off(monkeypatch, tmp_path):
    monkeypatch.setenv(compile_cache.VARIABLE, "off")
    assert compile_cache.enable() is None and jax.config.jax_compilation_cache_dir is None
    assert not (tmp_path / "cache").exists()


def test_what_jax_was_told_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert compile_cache.enable() is None and jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "file" / "below"))
    assert compile_cache.enable() is None and jax.config.jax_compilation_cache_dir is None
