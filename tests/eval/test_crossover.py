"""Where one way to decode becomes faster than another: interpolation, and rounds that have no answer."""

from __future__ import annotations

import math

import pytest

from eval.studies.crossover import crossover, summary

CONTEXTS = [256, 1024, 4096]


@pytest.mark.parametrize(
    "ratios, tokens",
    [
        ([1.5, 1.5, 0.5], 2048.0),  # half of the way on a logarithmic scale
        ([1.5, 0.5, 0.5], 512.0),
        ([2.0, 1.5, 1.0], 4096.0),
        ([1.4, 0.9, 0.8], 256 * 4**0.8),
        ([1.5, 0.5, 1.5], None),  # faster in between is not for good
        ([1.5, 1.4, 1.1], None),
        ([0.5, 1.5, 0.5], 2048.0),  # nor is faster before
        ([0.9, 0.8, 1.0], 0.0),
    ],
)
def test_the_ratio_comes_down_to_one_for_good(ratios, tokens):
    found = crossover(CONTEXTS, ratios)
    assert found == (None if tokens is None else pytest.approx(tokens, abs=1e-6))


def test_a_line_in_the_logarithm_is_met_where_it_is_one():
    ratio = lambda tokens: 3 - 0.2 * math.log2(tokens)  # 1 at 2**10
    assert crossover([128, 700, 3000], [ratio(t) for t in (128, 700, 3000)]) == pytest.approx(1024)


def test_rounds_give_the_interval_and_one_without_a_crossover_leaves_it_open():
    cells = lambda *rounds: [
        {"context": t, "ratio": r} for t, r in zip(CONTEXTS, zip(*rounds, strict=True), strict=True)
    ]
    found = summary(cells([1.5, 1.5, 0.5], [1.5, 0.5, 0.5], [1.5, 0.75, 0.5]))
    assert found["least"] == pytest.approx(512) and found["most"] == pytest.approx(2048)
    assert found["tokens"] == pytest.approx(256 * 4 ** (2 / 3))
    still = summary(cells([1.5, 1.5, 1.2], [1.5, 0.5, 0.5], [1.5, 1.5, 1.1]))
    assert (still["tokens"], still["least"], still["most"]) == (None, pytest.approx(512), None)
