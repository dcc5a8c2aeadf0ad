"""Real models against transformers, with the same dequantised weights, in float32 on the CPU."""

import functools

import numpy as np
import pytest
from scipy.special import logsumexp

from models import registry
from models.errors import ModelError
from tests import golden
from tests.models import run

FAST = ("capital", "python", "chat_system")
QWEN = "qwen2.5-coder-0.5b-instruct"


@functools.cache
def _load(name: str) -> registry.Model:
    return registry.load(name)


def _compare(model: registry.Model, cases: list[golden.Continuation], steps: int) -> None:
    """The logits after each prompt, and the tokens that follow greedily."""
    tokens, logits = run.greedy(model.params, model.config, [case.prompt for case in cases], steps)
    for case, found, after in zip(cases, tokens, logits, strict=True):
        np.testing.assert_allclose(after[case.top_ids], case.top_logits, atol=1e-3, rtol=0, err_msg=case.name)
        np.testing.assert_allclose(logsumexp(after.astype(np.float64)), case.logsumexp, atol=1e-3, err_msg=case.name)
        np.testing.assert_allclose(np.linalg.norm(after), case.norm, rtol=1e-4, err_msg=case.name)
        assert found.tolist() == case.greedy[:steps], case.name


def test_smollm2_says_what_transformers_says():
    cases = [case for case in golden.continuations(registry.DEFAULT) if case.name in FAST]
    assert len(cases) == len(FAST)
    _compare(_load(registry.DEFAULT), cases, steps=32)


@pytest.mark.slow
def test_smollm2_says_what_transformers_says_to_every_prompt():
    cases = golden.continuations(registry.DEFAULT)
    assert len(cases) >= 20 and max(len(case.prompt) for case in cases) > 800
    for long in (False, True):
        _compare(_load(registry.DEFAULT), [case for case in cases if (len(case.prompt) > 100) == long], steps=32)


@pytest.mark.slow
def test_qwen_says_what_transformers_says():
    try:
        registry.find(QWEN)
    except ModelError as error:
        pytest.skip(str(error))
    _compare(_load(QWEN), golden.continuations(QWEN), steps=32)


def test_the_golden_tokens_lead_clearly():
    """A token that leads by less than float32 noise would test nothing."""
    assert min(case.margin for case in golden.continuations(registry.DEFAULT)) >= 2e-3
