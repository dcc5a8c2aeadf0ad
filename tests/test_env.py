"""`python -m skg_jax.env`: the facts are true, and the report survives what is missing."""

import json
import os
import platform
import subprocess
import sys

import jax
import numpy
import pytest
from jaxtyping import TypeCheckError

from skg_jax import env


def test_json_reports_the_environment_of_the_command():
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "SKG_MARK": "17", "UNRELATED": "18"}
    command = [sys.executable, "-m", "skg_jax.env", "--json"]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True, env=environ).stdout)
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["versions"]["numpy"] == numpy.__version__
    assert facts["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert facts["devices"] == [{"platform": "cpu", "kind": "cpu", "memory": None}]
    assert facts["settings"]["SKG_MARK"] == "17"
    assert facts["settings"]["JAX_PLATFORMS"] == "cpu"
    assert "UNRELATED" not in facts["settings"]


def test_text_has_a_line_per_fact(capsys):
    env.main([])
    lines = capsys.readouterr().out.splitlines()
    assert f"  jax: {jax.__version__}" in lines
    assert {"versions:", "machine:", "devices:"} <= set(lines)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("jax", "surely-not-installed"))
    assert env.versions()["surely-not-installed"] is None
    assert "  surely-not-installed: -" in env.render({"versions": env.versions()})


def test_broken_jax_becomes_a_fact(monkeypatch):
    def broken():
        raise RuntimeError("no device")

    monkeypatch.setattr(jax, "devices", broken)
    assert env.devices() == [{"error": "RuntimeError: no device"}]


@pytest.mark.parametrize(
    "runtime, bad", [(None, False), (12060, False), (12080, True), (12090, True), (12091, False), (13000, False)]
)
def test_warns_of_cuda_releases_that_miscompile(runtime, bad):
    assert (env.cuda_warning(runtime) is not None) == bad


def test_cuda_libraries_that_do_not_load_have_no_version(monkeypatch):
    class Libraries:
        @staticmethod
        def cuda_runtime_get_version() -> int:
            return 12080

        @staticmethod
        def cudnn_get_version() -> int:
            raise OSError("libcudnn is missing")

    monkeypatch.setattr(env, "_cuda_plugin", lambda: Libraries)
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    found = env.cuda()
    assert (found["cuda_runtime"], found["cudnn"], found["cublas"]) == (12080, None, None)
    assert "12080" in found["warning"]


def test_commit_is_unknown_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "__file__", str(tmp_path / "skg_jax" / "env.py"))
    assert env.versions()["commit"] is None


def test_a_command_that_fails_says_nothing():
    assert env._output(sys.executable, "-c", "print(1); raise SystemExit(3)") == ""
    assert env._output("surely-not-a-program") == ""


def test_signatures_are_checked_while_tests_run():
    with pytest.raises(TypeCheckError, match="runtime"):
        env.cuda_warning("12080")  # type: ignore[reportArgumentType]
