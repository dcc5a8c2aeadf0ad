"""Requests on a loaded model: what stops them, what they compile, what is left when they are cut short."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax._src.test_util as jtu
import numpy as np
import pytest

from models import published
from skg_jax.engine import Engine, Options, RequestError
from skg_jax.engine.engine import UNKNOWN_MODEL_TAU
from skg_jax.guard import GuardConfig, crossover
from skg_jax.tokenizer import Tokenizer
from tests.engine import tiny

DENSE = Options(attention="dense", max_tokens=60, seed=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny.engine()


@pytest.fixture(scope="module")
def full(engine):
    """Sixty tokens, without anything that stops them."""
    return engine.generate(tiny.TEXT, DENSE)


def _ending_with(engine: Engine, eos_ids) -> Engine:
    """The same engine, programs included, with end tokens."""
    known = engine.tokenizer
    tokenizer = Tokenizer(known.backend, bos=None, eos_ids=eos_ids, chat_template=known.chat_template)
    other = Engine(engine.model, tokenizer)
    other._compiled = engine._compiled
    return other


def _ids(engine: Engine, count: int) -> list[int]:
    return np.random.default_rng(count).integers(2, 320, count).tolist()


# -- what ends a request ----------------------------------------------------------------------------------------------


def test_max_tokens_ends_it(full, engine):
    assert (full.generated_tokens, full.finish_reason) == (60, "length")
    assert full.text == engine.tokenizer.decode(full.token_ids)
    one = engine.generate(tiny.TEXT, dataclasses.replace(DENSE, max_tokens=1))
    assert (one.token_ids, one.finish_reason) == (full.token_ids[:1], "length")
    assert one.certificate.steps == 0 and one.timing.decode_tok_s is None


def test_a_stop_string_across_token_borders_ends_it(full, engine):
    decode = engine.tokenizer.decode
    n = next(
        n
        for n in range(20, 59)
        if "�" not in decode(full.token_ids[n - 1 : n + 1]) and len(decode(full.token_ids[n : n + 1])) > 0
    )
    stop = decode(full.token_ids[n - 1 : n + 1])
    result = engine.generate(tiny.TEXT, dataclasses.replace(DENSE, stop=("not in there", stop)))
    assert result.finish_reason == "stop"
    assert result.text == full.text[: full.text.index(stop)]
    assert result.token_ids == full.token_ids[: len(result.token_ids)] and len(result.token_ids) <= n + 1


def test_an_end_token_ends_it_and_can_be_ignored(full, engine):
    end = full.token_ids[7]
    first = full.token_ids.index(end)
    ending = _ending_with(engine, [end])
    result = ending.generate(tiny.TEXT, DENSE)
    assert (result.token_ids, result.finish_reason) == (full.token_ids[: first + 1], "stop")
    ignoring = ending.generate(tiny.TEXT, dataclasses.replace(DENSE, ignore_end=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == (full.token_ids, "length")


def test_the_context_ends_it_and_a_note_says_so(engine):
    prompt = _ids(engine, tiny.CONTEXT - 3)
    run = engine.start([prompt], DENSE)
    assert [*run] and run.results()[0].generated_tokens == 3
    assert run.notes == ("max_tokens is cut from 60 to 3: prompt and answer share the 512 tokens that tiny holds.",)
    assert engine.start([_ids(engine, 40)], DENSE).notes == ()


def test_prompts_that_do_not_fit_are_refused(engine):
    engine.start([_ids(engine, tiny.CONTEXT - 1)], DENSE)
    for length in (tiny.CONTEXT, tiny.CONTEXT + 9):
        with pytest.raises(RequestError, match=f"the prompt has {length} tokens, but tiny holds 511 at most"):
            engine.start([_ids(engine, length)], DENSE)


@pytest.mark.parametrize("prompts", [[""], [" \n"], ["a", ""], [[]], []])
def test_empty_prompts_are_refused(engine, prompts):
    with pytest.raises(RequestError, match="the prompt is empty|there is no prompt"):
        engine.start(prompts, DENSE)


def test_an_unknown_operating_point_is_noted(engine):
    guarded = Options(guard=GuardConfig(tau=None), max_tokens=5)
    (note,) = engine.start(["a"], guarded).notes
    assert note.startswith(f"no operating point is known for tiny with these settings, so tau is {UNKNOWN_MODEL_TAU}")
    assert engine.start(["a"], dataclasses.replace(guarded, guard=GuardConfig(tau=0.3))).notes == ()


def test_system_message_and_template_and_raw(engine):
    encode = lambda **fields: engine.tokenizer.decode(engine.encode("hello", Options(**fields)), skip_special=False)
    assert encode() == "<|im_start|>user\nhello\n"
    assert encode(system="be brief") == "<|im_start|>system\nbe brief\n<|im_start|>user\nhello\n"
    assert encode(raw=True, system="be brief") == "hello"


# -- the crossover below which dense attention is faster --------------------------------------------------------------

GUARDED = Options(max_tokens=30, seed=1, pages=0.3, guard=GuardConfig(tau=0.5))


def _measured(monkeypatch, **changed) -> None:
    """As if the tiny model were published, and its crossover measured on this device."""
    row = {"device": jax.devices()[0].device_kind, "config": "tiny", "batch": 1, "page_size": 16, "pages": 0.3}
    monkeypatch.setitem(published._CONFIGS, "tiny", tiny.CONFIG)
    monkeypatch.setattr(crossover, "table", lambda: [row | {"tokens": 320} | changed])


def test_the_measured_crossover_is_used_reported_and_can_be_overridden(full, engine, monkeypatch):
    _measured(monkeypatch, tokens=full.prompt_tokens + 11)
    short = lambda **fields: engine.generate(tiny.TEXT, dataclasses.replace(GUARDED, **fields)).certificate
    found = engine.generate(tiny.TEXT, GUARDED)
    assert (found.certificate.short, found.certificate.terms.dense_below) == (10, full.prompt_tokens + 11)
    assert found.token_ids[:11] == full.token_ids[:11]
    exact = [a.exact for a in found.attempts if a.token is not None]
    assert exact[:10] == [True] * 10 and found.certificate.accepted > 0
    assert "Attention was exact in 10 of the 29 steps" in str(found.certificate)
    assert short(dense_below=0).short == 0
    assert short(dense_below=10**12).statement == "Every step (29) used exact attention."


def test_only_guarded_requests_have_a_crossover(engine, monkeypatch):
    sparse = lambda: engine.generate(tiny.TEXT, dataclasses.replace(GUARDED, attention="sparse"))
    without = sparse()
    _measured(monkeypatch, tokens=500)
    for found in (
        sparse(),
        engine.generate(tiny.TEXT, dataclasses.replace(GUARDED, attention="sparse", dense_below=9**9)),
    ):
        assert found.token_ids == without.token_ids and found.pages == without.pages
        assert found.certificate.terms.dense_below == 0 and found.pages["selected_fraction"] < 0.9


def test_a_crossover_holds_for_what_it_was_measured_with(engine, monkeypatch):
    below = lambda **fields: engine._job(["a"], dataclasses.replace(GUARDED, **fields)).dense_below
    assert below() == 0
    _measured(monkeypatch)
    assert below() == 320
    assert below(selector="topp") == below(pages=0.2) == below(page_size=32) == 0
    _measured(monkeypatch, device="another")
    assert below() == 0 and engine.start(["a"], GUARDED).notes == ()


# -- shapes and programs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "need, tokens",
    [(2, 512), (512, 512), (513, 1024), (1025, 1536), (1537, 2048), (2049, 3072), (3073, 4096), (9000, 12288)],
)
def test_buckets_are_1_1_5_and_2_times_powers_of_two(engine, need, tokens):
    job = engine._job([[3]], DENSE)._replace(prompts=[(3,) * (need - 2), (5,)], limits=[2, 1])
    shape = engine.shape(job)
    assert (shape.batch, shape.tokens) == (2, tokens)


def test_a_second_request_of_a_bucket_compiles_nothing(engine, caplog):
    """Other limits, budgets, lengths and seeds are data. Not even a trace or a slow dispatch is allowed."""
    guarded = Options(max_tokens=40, seed=1, guard=GuardConfig(tau=0.3))
    engine.generate(tiny.TEXT, guarded)
    count = len(engine._compiled)
    others = [
        dataclasses.replace(guarded, guard=GuardConfig(tau=0.05, alpha=0.2), seed=2),
        dataclasses.replace(guarded, pages=0.2, max_tokens=17, stop=("zq",), dense_below=170),
        dataclasses.replace(guarded, pages=7.0, guard=GuardConfig(tiers=(9.0,), spending="ledger", spare_attempts=0)),
    ]
    with (
        caplog.at_level(logging.WARNING),
        jax.log_compiles(),
        jtu.count_jit_tracing_cache_miss() as traces,
        jtu.count_pjit_cpp_cache_miss() as slow,
        jtu.count_aot_jit_cpp_cache_miss() as slow_ahead_of_time,
    ):
        results = [engine.generate(tiny.TEXT[:500], options) for options in others]
    assert [r.generated_tokens for r in results] == [40, 17, 40]
    assert (traces(), slow(), slow_ahead_of_time()) == (0, 0, 0)
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]
    assert len(engine._compiled) == count
    assert all(r.timing.compile_s < 0.1 for r in results)


def test_another_number_of_tiers_is_another_program(engine):
    asked = lambda tiers: engine._job([[3]], Options(guard=GuardConfig(tiers=tiers)))
    shapes = {engine.shape(asked(tiers)) for tiers in ((), (0.25,), (0.3,), (0.25, 0.5))}
    assert sorted(shape.tiers for shape in shapes) == [2, 3, 4]
    unguarded = engine._job([[3]], Options(attention="sparse", pages=0.5, guard=GuardConfig(tiers=(0.25,))))
    assert engine.shape(unguarded).tiers == 2  # and tiers below the first budget do not matter


def test_every_first_budget_can_be_asked_for_without_naming_tiers(engine):
    for pages, tiers in ((0.1, [0.1, 0.25]), (0.5, [0.5]), (64.0, [64.0, 160.0])):
        job = engine._job([[3]], dataclasses.replace(Options(), pages=pages))
        np.testing.assert_allclose(job.requests.policy.budgets[0], [*tiers, np.inf])


def test_an_operating_point_holds_for_what_it_was_measured_with(engine, monkeypatch):
    monkeypatch.setattr("skg_jax.engine.engine.operating_point", lambda *_: 0.125)
    assert engine._job([[3]], Options()).tau == 0.125
    for other in (Options(selector="topp"), Options(page_size=32)):
        job = engine._job([[3]], other)
        assert job.tau == UNKNOWN_MODEL_TAU and "no operating point" in job.notes[0]


# -- batches, seeds, interruptions ------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts(full, engine):
    prompts = [tiny.TEXT[:200], tiny.TEXT]
    results = engine.generate(prompts, dataclasses.replace(DENSE, max_tokens=25))
    assert [r.prompt_tokens for r in results] == [len(engine.encode(p, DENSE)) for p in prompts]
    alone = engine.generate(prompts[0], dataclasses.replace(DENSE, max_tokens=25))
    assert results[0].token_ids == alone.token_ids
    assert results[1].token_ids == full.token_ids[:25]


def test_equal_seeds_give_equal_runs(engine):
    asked = lambda seed: engine.generate(tiny.TEXT, Options(max_tokens=30, seed=seed, guard=GuardConfig(tau=0.3)))
    first, again, other = asked(5), asked(5), asked(6)
    assert first.attempts == again.attempts and first.text == again.text
    assert [a.bound for a in first.attempts] != [a.bound for a in other.attempts]
    drawn = engine.generate(tiny.TEXT, Options(max_tokens=1, attention="dense"))
    assert 0 <= drawn.seed < 2**32


def test_an_interrupted_run_keeps_what_it_has(full, engine):
    run = engine.start([tiny.TEXT], DENSE)
    pieces = []
    for piece in run:
        pieces.append(piece.text)
        if len(pieces) == 20:
            break
    result = run.results()[0]
    assert result.finish_reason == "interrupted"
    assert result.text == "".join(pieces) and full.text.startswith(result.text)
    assert 20 <= result.generated_tokens < 60
    assert result.certificate.steps == result.generated_tokens - 1 == len(result.attempts)
    assert engine.start([tiny.TEXT], DENSE).results()[0].certificate.steps == 0


def test_times_are_one_per_step(full):
    """Log lines that the last dispatch did not reach are no tokens."""
    assert len(full.timing.itl_s) == full.generated_tokens - 1 == 59
    assert sum(full.timing.itl_s) == pytest.approx(59 / full.timing.decode_tok_s)


def test_corrupt_keys_end_the_request_with_an_error(engine, monkeypatch):
    """Every sealed key is changed after the prefill: an audit meets one, and nothing after it is trusted."""
    programs = engine.programs

    def corrupting(job, shape):
        prefill, decode, seconds = programs(job, shape)
        return prefill, lambda params, cache, *rest: decode(params, cache._replace(k=cache.k + 1), *rest), seconds

    monkeypatch.setattr(engine, "programs", corrupting)
    run = engine.start([tiny.TEXT], Options(max_tokens=40, seed=1, guard=GuardConfig(tau=1e-6)))
    pieces = [piece.text for piece in run]
    result = run.results()[0]
    assert result.finish_reason == "error" and result.text == "".join(pieces)
    assert "do not match their checksum" in result.error and "run the request again" in result.error
    assert result.certificate.scope == "none" and "checksum" in result.certificate.reason
    assert result.to_json()["error"] == result.error
