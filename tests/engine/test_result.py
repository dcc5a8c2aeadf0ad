"""Counts of pages and bytes against sums by hand, and the JSON record."""

from __future__ import annotations

import json
import math

import pytest

from models.config import ModelConfig
from skg_jax.engine.options import Options
from skg_jax.engine.result import Result, Timing, byte_counts, page_counts
from skg_jax.guard import Attempt, Terms, Verdict, certify

# 2 layers, 2 KV heads: 4 lists of pages a step. Pages of 16 tokens: 9 at position 130, 9 at 131.
CONFIG = ModelConfig(
    architecture="llama", vocab_size=7, embed_dim=8, mlp_dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
)


def _attempt(position, token, verdict, selected, *, exact=False, units=0, audited=0, bound=0.0) -> Attempt:
    return Attempt(
        position=position, token=token, verdict=verdict, exact=exact, bound=bound, cap=math.inf, units=units,
        drawn=audited, audited=audited, selected=selected, total=36, violated=False, unbounded=0, key_reused=False,
        uncovered=False, corrupt=None,
    )  # fmt: skip


ATTEMPTS = [
    _attempt(130, None, Verdict.EXPAND, 12, units=24, audited=3, bound=math.inf),
    _attempt(130, None, Verdict.FALLBACK, 20, units=16, audited=5, bound=0.4),
    _attempt(130, 3, Verdict.ACCEPT, 36, exact=True),
    _attempt(131, 5, Verdict.ACCEPT, 12, units=24, audited=2, bound=0.1),
]


def test_pages_of_every_attempt_are_counted():
    assert page_counts(ATTEMPTS) == {
        "total": 36 + 36,  # two steps stand
        "selected_fraction": (12 + 20 + 12) / (3 * 36),
        "audited_fraction": (3 + 5 + 2) / (24 + 16 + 24),
        "read_fraction": (12 + 20 + 36 + 12 + 3 + 5 + 2) / 72,
    }


def test_bytes_follow_from_the_pages():
    keys = 16 * 24 * 2  # of one page of one head, in 2 bytes
    record = 64 * 24 // 2 + 24 * 4 + 64 * 2  # 4-bit codes; scale and zero of each channel; norm of each key's rest
    assert byte_counts(ATTEMPTS, CONFIG, Options(), 2) == {
        "dense_kv": 2 * keys * 72,
        "read_kv": 2 * keys * 80,
        "sketch": record * 3 * 2 * 4,  # three sparse attempts, two sealed blocks, four heads
        "audit": keys * 10,
    }


def test_dense_attention_reads_no_sketch_and_a_run_without_steps_reads_nothing():
    dense = [_attempt(130, 1, Verdict.ACCEPT, 36, exact=True)]
    counts = byte_counts(dense, CONFIG, Options(attention="dense"), 4)
    assert counts["sketch"] == counts["audit"] == 0
    assert counts["dense_kv"] == counts["read_kv"] == 36 * 2 * 16 * 24 * 4
    assert set(page_counts([]).values()) == {0}


@pytest.fixture
def result() -> Result:
    options = Options(seed=4)
    return Result(
        text="ab", token_ids=(3, 5), prompt_tokens=130, finish_reason="length",
        certificate=certify(Terms("guarded", 0.01, 0.2, "mass", "uniform"), ATTEMPTS), model="m", seed=4,
        options=options,
        pages=page_counts(ATTEMPTS), bytes=byte_counts(ATTEMPTS, CONFIG, options, 2),
        timing=Timing(0.5, 10.0, 4.0, 1.0, (0.2,)), attempts=tuple(ATTEMPTS),
    )  # fmt: skip


def test_json_has_what_was_promised(result):
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert {name: record[name] for name in ("text", "prompt_tokens", "generated_tokens", "finish_reason", "seed")} == {
        "text": "ab", "prompt_tokens": 130, "generated_tokens": 2, "finish_reason": "length", "seed": 4,
    }  # fmt: skip
    assert {"model", "attention", "selector"} <= set(record)
    assert set(record["pages"]) == {"total", "selected_fraction", "audited_fraction", "read_fraction"}
    assert set(record["bytes"]) == {"dense_kv", "read_kv", "sketch", "audit"}
    assert {"ttft_s", "decode_tok_s", "prefill_tok_s"} <= set(record["timing"])
    certificate = record["certificate"]
    counted = [certificate[name] for name in ("steps", "accepted", "expanded", "fallback", "uncertified")]
    assert counted == [2, 1, 1, 1, 0]
    assert (certificate["scope"], certificate["worst_bound"], certificate["mean_bound"]) == ("request", 0.1, 0.05)
    assert {"reason", "alpha", "tau"} <= set(certificate)


def test_the_full_record_holds_every_attempt_and_no_infinity(result):
    record = json.loads(json.dumps(result.to_json(attempts=True), allow_nan=False))
    assert [a["verdict"] for a in record["attempts"]] == ["EXPAND", "FALLBACK", "ACCEPT", "ACCEPT"]
    assert [a["bound"] for a in record["attempts"]] == [None, 0.4, 0.0, 0.1]
    assert record["token_ids"] == [3, 5]
    assert record["options"]["guard"]["tiers"] == [0.25]
