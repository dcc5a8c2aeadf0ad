"""The check of the sketch's bounds finds what it should: nothing on sound bounds, everything else."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.studies import sketch_validity as study
from eval.studies.sketch_validity import Cache, Way
from skg_jax.types import BLOCK

PAGE = 32


@functools.cache
def cache(dtype=jnp.bfloat16) -> Cache:
    rng = np.random.default_rng(0)
    layers, kv_heads, tokens, dim, steps, group = 2, 3, 3 * BLOCK, 64, 2, 3
    channel = lambda: rng.normal(size=(layers, kv_heads, 1, dim))
    keys = rng.normal(size=(layers, kv_heads, tokens, dim)) * np.exp(channel()) + 3 * channel()
    q = rng.normal(size=(layers, steps, kv_heads, group, dim)).astype(np.float32)
    return Cache("made up", np.array([0, 5]), np.asarray(jnp.asarray(keys, dtype)), q)


def score(way: str):
    return next(x for x in study.ways(PAGE, 3, 64, jnp.dtype(jnp.float32)) if x.name == way).score


def only(monkeypatch, *ways: Way) -> None:
    monkeypatch.setattr(study, "ways", lambda *_: iter(ways))


def test_masses_are_those_of_the_keys_one_by_one():
    q, keys = np.array([[[[2.0, 0.0]]]]), np.log([[[3.0, 1.0], [5.0, 1.0], [1.0, 9.0], [7.0, 1.0]]]) / np.sqrt(2)
    np.testing.assert_allclose(study.log_masses(q, keys, 2)[0, 0, 0], np.log([8.0, 8.0]))


@pytest.mark.parametrize("way", ["xla sketch", "xla group", "lanes token"])
def test_bounds_hold_and_the_control_is_seen(monkeypatch, way):
    only(monkeypatch, Way(way, "float32", score(way)))
    (row,) = study.check(cache(), PAGE)
    assert (row["violations"], row["units"]) == (0, 2 * 2 * 9 * 6)
    assert row["least_margin"] > 0 and row["layers"] == [0, 5] and row["tokens"] == 3 * BLOCK
    assert row["outside_if_shrunk"]["0.05"] > 0.05


@pytest.mark.slow
def test_every_way_that_runs_here_holds():
    rows = list(study.check(cache(), PAGE))
    assert {row["way"] for row in rows} >= {"lanes group", "interpreted kernel token", "interpreted kernel group"}
    assert all(row["violations"] == 0 < row["units"] for row in rows)


@pytest.mark.parametrize("spoil", [lambda x: x + 9.0, lambda x: x * jnp.nan])
def test_wrong_scores_are_counted(monkeypatch, spoil):
    sound = score("xla sketch")
    wrong = lambda q, record: jax.tree.map(spoil, sound(q, record))
    only(monkeypatch, Way("wrong", "float32", wrong))
    (row,) = study.check(cache(), PAGE)
    assert row["violations"] > row["units"] // 2


def test_a_recording_is_checked_as_it_was_kept(monkeypatch, tmp_path, capsys):
    """`--record` without a model, then `--check`, which fails for bounds that do not hold."""
    monkeypatch.setattr(study, "_decoded", lambda args: iter([cache(jnp.float32)]))
    file, out = tmp_path / "keys.npz", ("--json", str(tmp_path / "out.json"))
    monkeypatch.setattr(sys, "argv", ["sketch_validity", "--record", str(file), "--layers", "2"])
    study.main()
    back = study.load(file)
    np.testing.assert_array_equal(back.keys, cache().keys)
    np.testing.assert_array_equal(back.q, cache().q)
    monkeypatch.setattr(sys, "argv", ["sketch_validity", *f"--page-size {PAGE} --check".split(), str(file), *out])
    sound = score("xla sketch")
    only(monkeypatch, Way("xla sketch", "bfloat16", sound))
    study.main()
    assert '"violations": 0' in (tmp_path / "out.json").read_text()
    spoiled = lambda q, record: jax.tree.map(lambda x: x - 9.0, sound(q, record))
    only(monkeypatch, Way("wrong", "bfloat16", spoiled))
    with pytest.raises(SystemExit, match="outside its bounds"):
        study.main()
