"""The claim itself, on a real model: no exact residual in float64 exceeds its certified bound, and no page its own."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import skg_jax
from eval.studies.prefilled import prefill_prompt
from eval.studies.prompts import HELD_OUT, prompt_ids
from eval.studies.shadow import ShadowStep, head_truth, shadow_run
from models import registry
from skg_jax.engine import Options
from skg_jax.guard import GuardConfig


@functools.cache
def _engine():
    return skg_jax.load(registry.DEFAULT)


def _steps(start: int, length: int, options: Options, count: int) -> list[ShadowStep]:
    prompt = prompt_ids(_engine().tokenizer, HELD_OUT, start, length)
    return list(shadow_run(_engine(), prefill_prompt(_engine(), prompt, options), prompt, options, count))


def _verify(steps: list[ShadowStep], output: bool = False) -> None:
    assert any(not s.attempt.exact for s in steps)
    for s in steps:
        assert s.violations == 0, f"{s.violations} of {s.units} pages at position {s.attempt.position}"
        assert s.delta <= s.residual + 1e-12
        assert (s.output if output else s.residual) <= s.attempt.bound
    delta, residual, bound = np.mean([(s.delta, s.residual, s.attempt.bound) for s in steps], axis=0)
    print(f"{len(steps)} attempts, {sum(s.units for s in steps)} pages checked")
    print(f"means: delta {delta:.3f}, R {residual:.3f}, bound {bound:.3f}")


def test_bounds_hold_on_a_real_model():
    """Few steps of one prompt, full audits; the bound is neither vacuous nor below the truth."""
    guard = GuardConfig(tau=1e-9, tiers=(), on_reject="release", audit_rate=0.02, rounds=(1,))
    steps = _steps(0, 2100, Options(max_tokens=8, guard=guard, seed=3), 4)
    _verify(steps)
    assert np.mean([s.attempt.bound / s.residual for s in steps]) < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10))
def test_bounds_hold_for_every_attempt_of_ten_long_prompts(start):
    """The default guard as users run it: accepted, expanded and exact attempts alike."""
    length = (2000, 3000, 4000, 5000, 6000)[start % 5]
    _verify(_steps(start, length, Options(max_tokens=33, seed=start), 32))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(2))
def test_output_bounds_hold(start):
    guard = GuardConfig(residual="output", weights="gain")
    _verify(_steps(start, 3000, Options(max_tokens=17, seed=start, guard=guard), 16), output=True)


def test_head_truth_by_hand():
    """The oracle against a case that fits on paper: four keys, pages of two, one page unread."""
    q, k = np.array([1.0, 0.0]), np.log([[2.0, 1.0], [4.0, 1.0], [1.0, 1.0], [3.0, 1.0]]) * np.sqrt(2)
    v = np.eye(4)
    lower, upper = np.log([6.0, 4.0]), np.log([6.0, 4.0])
    delta, x, change, violations, pages = head_truth(q, k, v, np.array([True, False]), (lower - 1e-9, upper + 1e-9), 2)
    assert (violations, pages) == (0, 1)
    assert delta == pytest.approx(0.4) and x == pytest.approx(0.4)
    sparse, dense = np.array([2, 4, 0, 0]) / 6, np.array([2, 4, 1, 3]) / 10
    assert change == pytest.approx(np.linalg.norm(dense - sparse) / np.linalg.norm(sparse))
    assert head_truth(q, k, v, np.array([True, False]), (lower, upper - 0.1), 2)[3] == 1
    assert head_truth(q, k, v, np.array([True, True]), (lower, upper), 2) == (0.0, 0.0, 0.0, 0, 0)
