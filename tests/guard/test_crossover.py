"""Where dense attention is faster: measured rows are found by what they were measured for, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models import published
from skg_jax.guard import crossover as module
from skg_jax.guard.crossover import crossover

ASKED = {"device": "NVIDIA H200", "model": "llama-3.1-8b", "batch": 4, "pages": 0.1, "page_size": 16}
ROW = {"device": "NVIDIA H200", "config": "llama-3.1-8b", "batch": 4, "page_size": 16, "pages": 0.1, "tokens": 3000}
ROWS = [ROW, ROW | {"batch": 16, "tokens": 700}, ROW | {"pages": 0.05, "batch": 1, "tokens": 111}]


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(module, "table", lambda: ROWS)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("batch, tokens", [(1, 3000), (4, 3000), (15, 3000), (16, 700), (99, 700)])
def test_the_largest_batch_that_is_not_above_counts_or_else_the_smallest(batch, tokens):
    asked: dict[str, Any] = ASKED | {"batch": batch}
    assert crossover(**asked) == tokens


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "field, other", [("device", "NVIDIA H100"), ("model", "llama-3.2-1b"), ("pages", 0.2), ("page_size", 32)]
)
def test_what_was_not_measured_has_none(field, other):
    asked: dict[str, Any] = ASKED | {field: other}
    assert crossover(**asked) == 0


def test_shipped_rows_are_complete_and_name_their_source():
    rows = module.table()
    keys = {tuple(row[name] for name in ("device", "config", "batch", "page_size", "pages")) for row in rows}
    assert len(keys) == len(rows)
    for row in rows:
        published.get(row["config"])
        assert row["tokens"] > 0 and (Path(__file__).parents[2] / row["source"]).is_file()
