"""What a user may ask of the guard, and what is refused with a sentence."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

from models import decoder
from skg_jax.guard import GuardConfig, head_weights, operating_point
from tests.decode.tiny import CONFIG


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tau": 0.0}, "tau"), ({"tau": -1.0}, "tau"), ({"tau": math.nan}, "tau"), ({"tau": math.inf}, "tau"),
        ({"alpha": 0.0}, "alpha"), ({"alpha": 1.0}, "alpha"), ({"alpha": math.nan}, "alpha"),
        ({"max_steps": 0}, "max_steps"), ({"spare_attempts": -1}, "spare_attempts"),
        ({"tiers": (0.3, 0.2)}, "tiers"), ({"tiers": (0.2, 0.2)}, "tiers"), ({"tiers": (0.0,)}, "tiers"),
        ({"tiers": (math.inf,)}, "tiers"), ({"audit_rate": 0.0}, "rate"), ({"audit_rate": 2.0}, "rate"),
        ({"rounds": ()}, "rounds"), ({"rounds": (2, 1)}, "rounds"),
    ],
)  # fmt: skip
def test_refusals(fields, word):
    with pytest.raises(ValueError, match=word):
        GuardConfig(**fields)


def test_tiers_must_exceed_the_first_budget():
    with pytest.raises(ValueError, match="exceed the first page budget"):
        GuardConfig(tiers=(0.25,)).policy(0.2, 0.3, [10])
    made = GuardConfig(tiers=(0.25, 64.0)).policy(0.2, 0.1, [10, 20])
    np.testing.assert_allclose(made.budgets, [[0.1, 0.25, 64, np.inf]] * 2)


def test_alpha_is_split_over_steps_and_spares():
    split, spares = GuardConfig(alpha=0.05, spare_attempts=30).plan(70)
    assert (split.alpha, split.attempts, spares) == (0.05, 100, 30)
    split, spares = GuardConfig(max_steps=40).plan(1000)
    assert (split.attempts, spares) == (50, 10)


def test_head_weights_sum_to_one():
    kernel = decoder.init(CONFIG, jax.random.key(1))["layers"]["attn"]["o"]["kernel"]
    made = {name: head_weights(GuardConfig(weights=name), kernel) for name in ("uniform", "gain")}
    for weights, missing in made.values():
        assert float(weights.omega.sum()) == pytest.approx(1, abs=1e-5)
        assert missing == () and float(weights.uncovered) == 0
    norms = np.linalg.norm(np.asarray(kernel, np.float64), ord=2, axis=(2, 3))
    np.testing.assert_allclose(made["gain"][0].omega, norms / norms.sum(), rtol=1e-4)
    np.testing.assert_allclose(made["uniform"][0].omega, np.full(norms.shape, 1 / norms.size), rtol=1e-6)


def test_head_weights_from_a_file(tmp_path):
    kernel = decoder.init(CONFIG, jax.random.key(1))["layers"]["attn"]["o"]["kernel"]
    table: list[list[float | None]] = [list(row) for row in np.arange(1.0, 19.0).reshape(3, 6).tolist()]
    table[1][2] = None
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(table))
    weights, missing = head_weights(GuardConfig(weights=str(path)), kernel)
    assert missing == ((1, 2),) and float(weights.omega[1, 2]) == 0
    assert float(weights.omega.sum() + weights.uncovered) == pytest.approx(1, abs=1e-5)
    rest = (sum(range(1, 19)) - 9) / 17
    assert float(weights.uncovered) == pytest.approx(rest / (sum(range(1, 19)) - 9 + rest), rel=1e-5)
    for bad, word in (([[1.0]], "shape"), ("x", "cannot read"), (np.full((3, 6), -1.0).tolist(), "finite numbers")):
        path.write_text(json.dumps(bad) if bad != "x" else "x")
        with pytest.raises(ValueError, match=word):
            head_weights(GuardConfig(weights=str(path)), kernel)
    with pytest.raises(ValueError, match="cannot read"):
        head_weights(GuardConfig(weights=str(tmp_path / "none.json")), kernel)


def test_operating_points_are_looked_up_by_what_they_were_measured_for():
    assert operating_point("no such model", GuardConfig(), 0.1) is None
    assert operating_point("smollm2-135m-instruct", GuardConfig(), 0.123) is None
