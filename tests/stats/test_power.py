"""Power: an audit is as tight as it was when it was designed, and tighter than with the draws it was chosen over."""

import numpy as np
import pytest

from eval.studies.sampling_designs import medians, population

# Medians over 12 fresh populations after 16, 32 and 64 reads, of the float64 simulation that the design rests on.
RECORDED = {"lognormal": (0.080, 0.050, 0.035), "zipf": (0.069, 0.043, 0.030)}


@pytest.mark.parametrize("kind", RECORDED)
def test_medians_are_the_recorded_ones(kind):
    found = medians(kind, "pps")
    print(kind, found.round(4), "recorded", RECORDED[kind])
    np.testing.assert_allclose(found, RECORDED[kind], rtol=0.15)


@pytest.mark.parametrize("kind", RECORDED)
def test_draws_at_the_boundary_need_many_more_reads(kind):
    """Control, and the comparison: the 80/20 design with 64 reads is looser than the recommended one with 16."""
    pps, boundary = medians(kind, "pps"), medians(kind, "80/20")
    assert np.all(boundary > pps * 1.15) and boundary[2] > pps[0]


@pytest.mark.parametrize("kind", RECORDED)
def test_populations_are_as_described(kind):
    drawn = [population(kind, seed) for seed in range(12)]
    assert all(np.all(bound >= w) and w.sum() == pytest.approx(0.02) for w, bound in drawn)
    assert np.median([bound.sum() for _, bound in drawn]) == pytest.approx(0.4, rel=0.2)
