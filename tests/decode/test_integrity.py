"""What goes wrong in a running request, and what the guard makes of it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from skg_jax.decode import decode_loop
from skg_jax.engine.run import attempt_of
from skg_jax.guard import Terms, Verdict, certify
from skg_jax.kv import cache as kv
from tests.decode import tiny
from tests.decode.test_loop import PROMPTS, STEPS

TERMS = Terms("guarded", 0.01, 1e3, "mass", "uniform")


def _start(tau=1e3, **options):
    asked = tiny.requests(PROMPTS, STEPS, tau, **options)
    return asked, *tiny.start(PROMPTS, asked)


def _attempts(log, row: int):
    return [attempt_of(log, line, row) for line in range(len(log.active)) if log.active[line, row]]


def test_altered_keys_stop_the_request_and_are_named():
    """Every block of row 1 is altered, so that the first audit must draw one."""
    asked, cache, rows = _start()
    blocks = np.asarray(cache.page_table[1])
    _, rows, log = tiny.finish(cache._replace(k=cache.k.at[:, blocks].multiply(1.01)), rows, asked)
    stopped = _attempts(log, 1)
    assert len(stopped) == 1 and stopped[0].verdict == Verdict.STOP and stopped[0].token is None
    assert stopped[0].corrupt is not None
    layer, block = stopped[0].corrupt
    assert 0 <= layer < tiny.CONFIG.num_layers and block in blocks
    claim = certify(TERMS, stopped)
    assert claim.scope == "none" and f"block {block} in layer {layer}" in claim.reason
    assert len(tiny.tokens_of(log, 0)) == len(tiny.tokens_of(log, 2)) == STEPS  # the neighbours go on
    assert rows.done.all()


def test_a_stale_block_is_read_and_the_step_still_certified():
    asked, cache, rows = _start()
    baseline = tiny.finish(*tiny.start(PROMPTS, asked), asked)[2]
    stale = cache.page_table[0, 2]
    cache, _, log = tiny.finish(cache._replace(written=cache.written.at[stale].add(1)), rows, asked)
    assert not kv.current(cache)[0, 2]
    steps = _attempts(log, 0)
    assert all(a.verdict == Verdict.ACCEPT and a.unbounded == 0 for a in steps)
    assert certify(TERMS, steps).scope == "request"
    assert log.selected[0, 0] > baseline.selected[0, 0]


def test_metadata_of_a_stale_block_enters_no_bound():
    """NaN in the sketch of a stale block changes nothing."""
    found = []
    for poison in (False, True):
        asked, cache, rows = _start()
        stale = cache.page_table[0, 2]
        low = cache.sketch.low.at[:, stale].set(jnp.nan if poison else 0.0)
        cache = cache._replace(written=cache.written.at[stale].add(1), sketch=cache.sketch._replace(low=low))
        found.append(tiny.finish(cache, rows, asked)[2])
    np.testing.assert_array_equal(found[0].token, found[1].token)
    np.testing.assert_array_equal(found[0].bound, found[1].bound)


def test_a_replayed_key_voids_the_request():
    asked, cache, rows = _start()
    cache, rows, first = decode_loop(tiny.params(), cache, asked, rows, program=tiny.PROGRAM)
    _, _, log = tiny.finish(cache, rows._replace(attempt=rows.attempt - 3), asked)
    steps = _attempts(log, 0)
    # two audited tries with old keys, the exact one they end in, and from then on fresh keys
    assert [(a.key_reused, a.verdict) for a in steps[:3]] == [
        (True, Verdict.EXPAND), (True, Verdict.FALLBACK), (False, Verdict.ACCEPT),
    ]  # fmt: skip
    assert steps[2].exact and not any(a.key_reused for a in steps[3:]) and not steps[3].exact
    claim = certify(TERMS, steps)
    assert claim.scope == "none" and "key" in claim.reason


def test_without_alpha_left_the_request_goes_on_exactly():
    asked, cache, rows = _start(attempts=5, spares=0)
    _, _, log = tiny.finish(cache, rows, asked)
    steps = _attempts(log, 0)
    assert [a.exact for a in steps] == [False] * 5 + [True] * (STEPS - 5)
    assert certify(TERMS, steps).scope == "request"


def test_without_alpha_and_without_exact_attention_later_steps_stand_alone():
    asked, cache, rows = _start(attempts=5, spares=0, to_exact=False)
    _, _, log = tiny.finish(cache, rows, asked)
    steps = _attempts(log, 0)
    assert [a.uncovered for a in steps] == [False] * 5 + [True] * (STEPS - 5)
    claim = certify(TERMS, steps)
    assert claim.scope == "per_decision" and claim.accepted == STEPS


def test_steps_released_unaccepted_are_counted():
    asked, cache, rows = _start(1e-9, spares=0, to_exact=False)
    _, _, log = tiny.finish(cache, rows, asked)
    claim = certify(TERMS, _attempts(log, 0))
    assert claim.scope == "per_decision" and claim.uncertified == STEPS and claim.accepted == 0


def test_an_uncovered_head_counts_as_lost():
    asked, cache, rows = _start(uncovered=0.25)
    _, _, log = tiny.finish(cache, rows, asked)
    assert log.bound[log.active].min() >= 0.25
    strict, cache, rows = _start(0.24, uncovered=0.25)
    _, _, log = tiny.finish(cache, rows, strict)
    assert log.exact[log.token >= 0].all()  # below the weight of the uncovered head nothing sparse can pass
