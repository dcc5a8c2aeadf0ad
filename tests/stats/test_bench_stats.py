"""`python -m skg_jax.bench stats`: what it reports of a small population, and what it refuses."""

import json

import pytest

from skg_jax.bench import cli, stats


@pytest.fixture
def small(monkeypatch):
    """No facts collected, and the process of the tests keeps its cores."""
    pinned = []
    monkeypatch.setattr(stats, "environment", dict)
    monkeypatch.setattr(stats, "limit_threads", pinned.append)
    return pinned


def test_the_json_has_both_audits_with_every_trial(small, capsys):
    assert cli.main(["stats", "--units", "3001", "--draws", "300", "--trials", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert small == [1] and found["settings"]["units"] == 3001
    for row in found["audits"].values():
        assert row["accepted"] and row["ms"]["n"] == 3 == len(row["trials_ms"])
        assert row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
        assert 0 < row["cpu_ms"]["min"] <= row["cpu_ms"]["median"] and row["load"] >= 0
        assert 0 < row["reads"] <= 300
        assert 0.1 < row["upper"] < row["cap"]  # the sum is a tenth


@pytest.mark.parametrize(
    ("flag", "value"), [("units", "0"), ("draws", "0"), ("trials", "0"), ("alpha", "1"), ("seed", "-1")]
)
def test_a_number_out_of_range_is_named(small, capsys, flag, value):
    with pytest.raises(SystemExit) as caught:
        cli.main(["stats", f"--{flag}", value])
    assert caught.value.code == 2
    assert f"{flag} must" in " ".join(capsys.readouterr().err.split())
