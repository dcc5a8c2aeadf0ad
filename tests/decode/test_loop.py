"""The compiled loop: batching, repetition, determinism, sealing, memory, one compilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from models import decoder, registry
from skg_jax.decode import Program, Rows, decode_loop, empty_log
from skg_jax.guard import Verdict
from skg_jax.guard.policy import init as guard_init
from skg_jax.kv import cache as kv
from skg_jax.kv import integrity
from skg_jax.types import BLOCK
from tests.decode import tiny
from tests.kv import oracle as keys_oracle

DENSE = dataclasses.replace(tiny.PROGRAM, mode="dense")
PROMPTS = [tiny.prompt(1, 400), tiny.prompt(2, 317), tiny.prompt(3, 391)]
STEPS = 20


def _run(prompts, tau, program=tiny.PROGRAM, **options):
    asked = tiny.requests(prompts, STEPS, tau, **options)
    cache, rows = tiny.start(prompts, asked, program)
    return tiny.finish(cache, rows, asked, program)


@pytest.fixture(scope="module")
def mixed():
    """Three rows that accept, expand and fall back beside each other."""
    taus = [1e3, *_between_tiers(PROMPTS[1:2]), 1e-9]
    return taus, _run(PROMPTS, taus)


def _between_tiers(prompts) -> list[float]:
    """A tau that the first tier mostly misses and the second mostly meets."""
    _, _, log = _run([*prompts] * 3, 1e-9)
    first, second = (
        log.bound[(log.verdict == v) & (log.drawn > 0) & ~log.exact] for v in (Verdict.EXPAND, Verdict.FALLBACK)
    )
    return [float((np.median(first) + np.median(second)) / 2)]


def test_mixed_verdicts_in_one_iteration_keep_each_rows_tokens(mixed):
    taus, (_, _, log) = mixed
    together = [set(log.verdict[i][log.active[i]]) for i in range(len(log.verdict))]
    assert {Verdict.ACCEPT, Verdict.EXPAND, Verdict.FALLBACK} in together
    for row, (prompt, tau) in enumerate(zip(PROMPTS, taus, strict=True)):
        # alone means: the other rows hold the same request, so that the program is the one already compiled
        _, _, alone = _run([prompt] * 3, tau)
        assert tiny.tokens_of(log, row) == tiny.tokens_of(alone, 0) and len(tiny.tokens_of(log, row)) == STEPS
        verdicts = lambda log, row: [int(v) for v, a in zip(log.verdict[:, row], log.active[:, row], strict=True) if a]
        assert verdicts(log, row) == verdicts(alone, 0)


def test_falling_back_at_every_step_is_dense_decoding(mixed):
    _, (_, _, log) = mixed
    _, _, dense = _run(PROMPTS, 1.0, DENSE)
    assert tiny.tokens_of(log, 2) == tiny.tokens_of(dense, 2)
    stood = log.token[:, 2] >= 0
    assert log.exact[stood, 2].all()
    assert dense.exact.all() and (dense.drawn == 0).all()


def test_below_the_crossover_steps_are_exact_unaudited_and_free_then_sparse_with_the_same_program(mixed):
    del mixed  # compiled the program
    jitted: Any = decode_loop
    _, _, dense = _run(PROMPTS, 1.0, DENSE)
    programs = jitted._cache_size()
    for first, sooner in ((405, 0), (411, 2**31 - 1)):
        _, rows, log = _run(PROMPTS, 1e3, dense_below=[first, sooner, 391])
        exact = [first - 401, STEPS if sooner else 0, 0]  # the first step of row 0 is over 401 tokens with its own
        assert log.active.all() and (log.verdict == Verdict.ACCEPT).all()
        for row, count in enumerate(exact):
            assert log.exact[:, row].tolist() == [True] * count + [False] * (STEPS - count)
            assert (log.selected[:count, row] == log.total[:count, row]).all()
            assert not log.units[:count, row].any() and log.drawn[count:, row].all()
            assert int(rows.guard.spending.attempts[row]) == STEPS - count
            assert tiny.tokens_of(log, row)[:count] == tiny.tokens_of(dense, row)[:count]
    assert jitted._cache_size() == programs


def test_with_every_row_below_the_crossover_no_sketch_is_read(mixed):
    """The exact branch is taken: what only the sparse branch reads may be NaN."""
    del mixed

    def spoilt(dense_below):
        asked = tiny.requests(PROMPTS, STEPS, 1e3, dense_below=dense_below)
        cache, rows = tiny.start(PROMPTS, asked)
        nan = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return tiny.finish(cache._replace(sketch=jax.tree.map(nan, cache.sketch)), rows, asked)

    _, rows, log = spoilt(1000)
    _, _, dense = _run(PROMPTS, 1.0, DENSE)
    np.testing.assert_array_equal(log.token, dense.token)
    assert log.exact.all() and not log.units.any() and not rows.guard.spending.attempts.any()
    _, _, sparse = spoilt(0)
    assert not np.isfinite(sparse.bound).all() or (sparse.verdict != Verdict.ACCEPT).any()  # there it is read


def test_a_loose_budget_reads_few_pages(mixed):
    _, (_, _, log) = mixed
    share = log.selected[:, 0] / log.total[:, 0]
    assert (log.verdict[log.active[:, 0], 0] == Verdict.ACCEPT).all()
    assert share[log.active[:, 0]].max() < 0.3


def test_same_seed_same_tokens_and_audits():
    first, second = (_run(PROMPTS, [1e3, 0.2, 1e-9])[2] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    other = _run(PROMPTS, [1e3, 0.2, 1e-9], seed=1)[2]
    assert tiny.tokens_of(other, 0) == tiny.tokens_of(first, 0)
    assert not np.array_equal(other.bound[:STEPS, 0], first.bound[:STEPS, 0])


def test_unused_cache_is_never_read():
    """Slots past the rows' lengths, and whole blocks beyond them, hold NaN."""
    asked = tiny.requests(PROMPTS, STEPS, [1e3, 0.2, 1e-9])
    cache, rows = tiny.start(PROMPTS, asked)
    expected = tiny.finish(*tiny.start(PROMPTS, asked), asked)[2]
    used = np.zeros((cache.written.shape[0], BLOCK), bool)
    for row, prompt in enumerate(PROMPTS):
        for t in range(len(prompt)):
            used[int(cache.page_table[row, t // BLOCK]), t % BLOCK] = True
    poison = lambda pool: jnp.where(used[None, :, None, :, None], pool, jnp.nan)
    poisoned = cache._replace(k=poison(cache.k), v=poison(cache.v))
    log = tiny.finish(poisoned, rows, asked)[2]
    np.testing.assert_array_equal(log.token, expected.token)
    np.testing.assert_array_equal(log.bound, expected.bound)


def test_blocks_filled_by_decoding_are_sealed_as_prefill_would():
    prompts = [tiny.prompt(5, 120), tiny.prompt(6, 127), tiny.prompt(8, 65)]
    cache, rows, _ = _run(prompts, 1e3)
    filled = [int(p) // BLOCK for p in rows.position]
    assert filled == [2, 2, 1]
    for row, count in enumerate(filled):
        blocks = cache.page_table[row, :count]
        again = kv.seal(cache._replace(sealed=cache.sealed - 1), blocks, jnp.ones(count, bool))
        ours, theirs = (jax.tree.map(lambda x, b=blocks: np.asarray(x[:, b]), c.sketch) for c in (cache, again))
        np.testing.assert_array_equal(ours.low, theirs.low)
        # compiled and eager divisions may round the step to neighbouring float16 numbers, and the rest follows its step
        np.testing.assert_allclose(ours.step.astype(np.float32), theirs.step.astype(np.float32), rtol=2**-10)
        missed = np.linalg.norm(np.asarray(cache.k[:, blocks], np.float64) - keys_oracle.decode(ours), axis=-1)
        ratio = ours.residual.astype(np.float64) / missed
        assert ratio.min() >= 1 and ratio.max() < 1.002
        assert kv.current(cache)[row, :count].all() and not kv.current(cache)[row, count:].any()
    assert integrity.scrub(cache) == []


def test_a_second_request_of_the_same_shape_compiles_nothing(mixed, caplog):
    del mixed  # compiled the programs
    with jax.log_compiles():
        _run(PROMPTS, [0.3, 1e-9, 0.01], alpha=0.2, spares=3, tiers=(0.2, 0.3), seed=9)
    compiled = [m for m in caplog.messages if "Finished XLA compilation" in m]
    assert not [m for m in compiled if "decode_loop" in m]
    jitted: Any = decode_loop  # the number of its programs is no part of jax's declared interface
    assert jitted._cache_size() <= 2  # guarded and dense


def test_the_switch_returns_two_arrays_beside_the_cache():
    """Each result is a copy on a GPU: hidden states, and all numbers of the rows as one."""
    asked = tiny.requests(PROMPTS, STEPS, [1e3, 0.2, 1e-9])
    cache, rows = tiny.start(PROMPTS, asked)
    traced = decode_loop.trace(tiny.params(), cache, asked, rows, None, program=tiny.PROGRAM)
    (switch,) = [eqn for eqn in _equations(traced.jaxpr.jaxpr) if eqn.primitive.name == "cond"]
    of_cache = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache)}
    others = [var.aval for var in switch.outvars if (var.aval.shape, var.aval.dtype) not in of_cache]
    assert [x.ndim for x in others] == [2, 2] and {x.shape[0] for x in others} == {len(PROMPTS)}


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from _equations(sub)


@pytest.mark.parametrize("given", [True, False])
def test_rows_and_a_log_that_is_given_back_keep_their_memory(mixed, given):
    """Control: without it a new log lies elsewhere, and the old one lives on."""
    del mixed  # compiled the program
    places = lambda tree: [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
    asked = tiny.requests(PROMPTS, STEPS, [1e3, 0.2, 1e-9])
    cache, rows = tiny.start(PROMPTS, asked)
    log = empty_log(tiny.PROGRAM.attempts_per_dispatch, len(PROMPTS))
    for _ in range(2):
        old, before = log, (places(rows), places(log))
        cache, rows, log = decode_loop(tiny.params(), cache, asked, rows, old if given else None, program=tiny.PROGRAM)
        assert places(rows) == before[0]
        assert (places(log) == before[1]) == given
        assert old.token.is_deleted() == given


def test_temporaries_stay_under_a_twentieth_of_the_cache():
    """SmolLM2 at its full context, guarded, nothing allocated: only the compiled program is asked."""
    config = registry.load().config
    program = Program(config)
    cache = jax.eval_shape(lambda: kv.init(config.num_layers, config.num_kv_heads, config.head_dim, 1, 8192))
    row = jnp.zeros(1, jnp.int32)
    heads = jnp.ones((config.num_layers, config.num_heads))
    asked = tiny.requests([tiny.prompt(1, 3)], STEPS, 1.0, omega=heads)
    rows = Rows(row, row, row, row, row > 0, guard_init(1))
    compiled = decode_loop.lower(decoder.abstract(config), cache, asked, rows, program=program).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    print(f"temporaries {analysis.temp_size_in_bytes / 1e6:.1f} MB, cache {size / 1e6:.1f} MB")
    assert analysis.temp_size_in_bytes < 0.05 * size
    assert analysis.alias_size_in_bytes > 0.99 * size  # donated: updated in place
