"""Real text from a real model: what transformers says, by dense decoding and by falling back at every step."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import skg_jax
from models import registry
from skg_jax.engine import Engine, Options
from skg_jax.guard import GuardConfig
from tests import golden

FAST = ("capital", "python", "ledger")
NEVER = GuardConfig(tau=1e-9)


@functools.cache
def engine() -> Engine:
    return skg_jax.load(registry.DEFAULT)


def _tokens(cases, options: Options):
    """Greedy tokens of a batch, past end tokens (the golden values do not stop)."""
    run = engine().start([case.prompt for case in cases], options)
    for _ in run:
        pass
    results = run.results()
    return [list(r.token_ids) for r in results], results


def _check(cases, options: Options):
    found, results = _tokens(cases, options)
    for case, tokens in zip(cases, found, strict=True):
        ended = len(tokens) < 32
        assert tokens == case.greedy[: len(tokens)], case.name
        assert not ended or tokens[-1] in engine().tokenizer.eos_ids, case.name
    return results


@pytest.fixture(scope="module")
def fast():
    return [case for case in golden.continuations(registry.DEFAULT) if case.name in FAST]


def test_dense_decoding(fast):
    assert len(fast) == len(FAST)
    results = _check(fast, Options(attention="dense", max_tokens=32, raw=True))
    assert sum(len(r.token_ids) for r in results) >= 64


def test_falling_back_at_every_step(fast):
    results = _check(fast, Options(max_tokens=32, raw=True, guard=NEVER, seed=0))
    long = max(results, key=lambda r: r.prompt_tokens)
    assert long.certificate.fallback == long.certificate.steps == len(long.token_ids) - 1
    assert any(not a.exact for a in long.attempts)  # sparse attempts were made, and rejected
    assert long.certificate.scope == "request" and long.certificate.worst_bound == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [Options(attention="dense", max_tokens=32), Options(max_tokens=32, guard=NEVER, seed=0)]
)
def test_every_prompt(options):
    cases = golden.continuations(registry.DEFAULT)
    assert len(cases) >= 20
    results = _check(cases, options)
    assert np.sum([len(r.token_ids) for r in results]) > 20 * 16
