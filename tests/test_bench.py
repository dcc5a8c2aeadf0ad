"""`python -m skg_jax.bench`: turns, sample counts, sums, refusals; and the comparison with torch on made-up numbers."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics

import jax
import numpy as np
import pytest

import skg_jax.engine
from eval.studies import cpu_speed
from skg_jax.bench import cli, decode, environment, summary
from skg_jax.bench import prompts as texts
from tests.engine import tiny

SHORT = ("--prompt-tokens", "300", "--generation-tokens", "20", "--trials", "3", "--tau", "0.5", "--pages", "30%")


@pytest.fixture
def shared(monkeypatch):
    """The tiny model, compiled once for all tests; no facts collected, no cache of the user touched."""
    engine = tiny.engine()
    monkeypatch.setenv("SKG_COMPILE_CACHE", "off")
    monkeypatch.setattr(skg_jax.engine, "load", lambda *_: engine)
    monkeypatch.setattr(decode, "environment", dict)
    return engine


@pytest.fixture
def seen(shared, monkeypatch):
    """(mode, prompts) of every request, in order."""
    start, calls = shared.start, []
    monkeypatch.setattr(shared, "start", lambda p, o: calls.append((o.attention, p)) or start(p, o))
    return calls


# -- decode -----------------------------------------------------------------------------------------------------------


def test_modes_take_turns_on_the_same_prompts(seen, capsys):
    assert cli.main(["decode", *SHORT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [mode for mode, _ in seen] == ["dense", "sparse", "guarded"] * 4  # one warm-up
    rounds = [[prompt for _, prompt in seen[i : i + 3]] for i in range(0, 12, 3)]
    assert all(dense == sparse == guarded for dense, sparse, guarded in rounds)
    assert len({str(dense) for dense, _, _ in rounds}) == 4
    assert [(t["mode"], t["trial"]) for t in found["trials"]] == [
        (mode, trial) for trial in range(3) for mode in ("dense", "sparse", "guarded")
    ]


def test_the_json_counts_samples_bytes_and_verdicts(seen, capsys):
    cli.main(["decode", *SHORT, "--json"])
    found = json.loads(capsys.readouterr().out)
    dense, sparse, guarded = (found["modes"][mode] for mode in ("dense", "sparse", "guarded"))
    for mode in (dense, sparse, guarded):
        assert (mode["ttft_s"]["n"], mode["tpot_s"]["n"], mode["itl_s"]["n"]) == (3, 3, 3 * 19)
        assert mode["itl_s"]["p50"] <= mode["itl_s"]["p95"] <= mode["itl_s"]["p99"]
    # steps at positions 300 to 318: 19 pages of 16 tokens up to 303, then 20; 2 layers, 2 heads, keys and values
    expected = 2 * 16 * 16 * 4 * 4 * (4 * 19 + 15 * 20)
    assert dense["bytes"] == {"dense_kv": expected, "read_kv": expected, "sketch": 0, "audit": 0}
    assert sparse["bytes"]["dense_kv"] == guarded["bytes"]["dense_kv"] == expected
    assert sparse["bytes"]["read_kv"] < 0.6 * expected and sparse["bytes"]["audit"] == 0 < guarded["bytes"]["audit"]
    assert dense["verdicts"]["fallback"] == 57 == sparse["verdicts"]["uncertified"]
    assert guarded["verdicts"]["accepted"] + guarded["verdicts"]["fallback"] == 57
    assert dense["speedup_over_dense"] == {"median": 1.0, "min": 1.0, "max": 1.0, "n": 3}
    assert found["warnings"] == [] and found["settings"]["tau"] == 0.5


def test_the_table_has_dense_beside_and_sample_counts(shared, capsys):
    assert cli.main(["decode", *SHORT, "--modes", "sparse", "--trials", "2", "--warmup", "0", "--batch-size", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["dense", "sparse", "n"]
    rows = {line[:22].strip(): line[22:].split() for line in lines[1:]}
    assert (rows["decode tok/s"][2], rows["ITL P99 ms"][2]) == ("2", "38")
    assert rows["speed-up over dense"][0] == "1.000"
    assert rows["uncertified"][:2] == ["0", "38"]


def test_an_unknown_operating_point_is_said_once(shared, capsys):
    argv = ["--prompt-tokens", "300", "--generation-tokens", "2", "--trials", "2", "--warmup", "0", "--json"]
    cli.main(["decode", *argv])
    out, err = capsys.readouterr()
    (warning,) = json.loads(out)["warnings"]
    assert "no operating point is known for tiny" in warning and err.count(f"warning: {warning}") == 1


def test_the_environment_is_the_one_of_this_process():
    facts = environment.environment()
    assert facts["versions"]["python"] == platform.python_version() and facts["versions"]["jax"] == jax.__version__
    assert facts["machine"]["cores"] == len(os.sched_getaffinity(0)) and facts["machine"]["cpu"]
    assert "commit" in facts["versions"] and facts["devices"]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, value, sentence",
    [
        ("--pages", "0", "pages must be a positive number, not 0.0."),
        ("--tau", "-1", "tau must be a positive number, not -1.0."),
        ("--alpha", "1", "alpha must be strictly between 0 and 1, not 1.0."),
        ("--threads", "0", "threads must be between 1 and the "),
        ("--threads", "100000", "threads must be between 1 and the "),
        ("--selector", "best", "unknown selector 'best'; choose one of "),
        ("--prompt-tokens", "512", "prompt and generation together must fit the 512 tokens of "),
    ],
)
def test_a_bad_argument_is_a_sentence(shared, capsys, flag, value, sentence):
    assert cli.main(["decode", "--generation-tokens", "2", flag, value]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {sentence}") and err.endswith(".\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "flag, value",
    [("prompt-tokens", "0"), ("generation-tokens", "1"), ("batch-size", "0"), ("trials", "0"), ("seed", "-1")],
)
def test_a_number_out_of_range_is_named(capsys, flag, value):
    with pytest.raises(SystemExit) as caught:
        cli.main(["decode", f"--{flag}", value])
    assert caught.value.code == 2
    assert f"{flag.replace('-', '_')} must be" in " ".join(capsys.readouterr().err.split())


def test_commands_are_listed(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    assert capsys.readouterr().out.count("  decode ") == 2
    assert cli.main(["speed"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: there is no benchmark 'speed'.\nusage: ")


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "main", interrupted)
    assert cli.main(["decode"]) == 130
    assert capsys.readouterr() == ("", "")


def test_threads_bind_the_process_to_cores(monkeypatch):
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append((pid, cores)))
    environment.limit_threads(None)
    environment.limit_threads(2)
    assert bound == [(0, [3, 5])]
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ValueError, match="threads cannot be limited on this system"):
        environment.limit_threads(1)


# -- prompts and sums -------------------------------------------------------------------------------------------------


def test_prompts_have_the_asked_length_and_follow_the_seed():
    encode = tiny.engine().tokenizer.encode
    prompts = functools.partial(texts.prompts, encode, 37, 3)
    first = prompts(seed=1)
    assert [len(p) for p in first] == [37] * 3 and len({tuple(p) for p in first}) == 3
    assert first == prompts(seed=1) and first != prompts(seed=2)
    assert tiny.engine().tokenizer.decode(first[0]).isascii()  # English, not noise


def test_a_prompt_longer_than_the_text_begins_anew(monkeypatch):
    monkeypatch.setattr(texts, "topics", {"b": "".join(map(chr, range(50, 101))), "a": "x" * 3})
    (ids,) = texts.prompts(lambda text: [*map(ord, text)], 997, 1, seed=0)
    whole = [120] * 3 + [10] + [*range(50, 101)]  # in order of the names, a line break between
    start = whole.index(ids[0])
    assert ids == (whole * 20)[start : start + 997]


def test_summaries_are_medians_percentiles_and_paired_ratios():
    rng = np.random.default_rng(5)
    trial = lambda mode, i, tpot: {
        "mode": mode, "trial": i, "ttft_s": 1.0 + i, "e2e_s": 9.0, "tpot_s": tpot, "decode_tok_s": 1 / tpot,
        "prefill_tok_s": 5.0, "read_fraction": 0.25, "itl_s": rng.random(41).tolist(),
        "bytes": {"read_kv": 10 + i}, "verdicts": {"accepted": 3, "fallback": i},
    }  # fmt: skip
    trials = [
        trial(mode, i, tpot)
        for i, pair in enumerate([(4.0, 2.0), (6.0, 2.0), (3.0, 6.0)])
        for mode, tpot in zip(("dense", "guarded"), pair, strict=True)
    ]
    found = summary.summarize(trials, "guarded")
    assert found["speedup_over_dense"] == {"median": 2.0, "min": 0.5, "max": 3.0, "n": 3}
    assert found["ttft_s"] == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    itl = sorted(x for t in trials if t["mode"] == "guarded" for x in t["itl_s"])
    assert found["itl_s"]["p50"] == pytest.approx(statistics.median(itl)) and found["itl_s"]["n"] == 123
    cuts = statistics.quantiles(itl, n=100, method="inclusive")
    assert (found["itl_s"]["p95"], found["itl_s"]["p99"]) == (pytest.approx(cuts[94]), pytest.approx(cuts[98]))
    assert found["bytes"] == {"read_kv": 11} and found["verdicts"] == {"accepted": 9, "fallback": 3}


# -- the comparison with torch ----------------------------------------------------------------------------------------


def test_the_peer_counts_by_its_fastest_way_and_ratios_are_within_rounds():
    side = lambda **ways: {
        "trials": {way: [{"decode_tok_s": v, "ttft_s": 10 / v} for v in values] for way, values in ways.items()}
    }
    mine = [side(skg_jax=[10.0, 12.0, 40.0]), side(skg_jax=[6.0, 6.0, 6.0])]
    peers = [
        side(loop=[6.0, 6.0, 7.0], generate=[1.0, 2.0, 99.0]),
        side(loop=[4.0, 4.0, 4.0], generate=[2.0, 2.0, 2.0]),
    ]
    speed = cpu_speed.compare(mine, peers)["decode_tok_s"]
    assert speed["best"] == "loop"
    assert speed["ratio"] == {"median": 1.75, "min": 1.5, "max": 2.0, "n": 2}  # 12/6 and 6/4
    assert speed["skg_jax"] == {"median": 8.0, "n": 6} and speed["torch"]["generate"] == {"median": 2.0, "n": 6}
    assert cpu_speed.compare(mine, peers)["ttft_s"]["best"] == "loop"
    assert "ratio to loop" in cpu_speed.table(cpu_speed.compare(mine, peers))


def test_rounds_alternate_and_both_sides_are_kept(monkeypatch, tmp_path, capsys):
    order = []

    def side(name):
        def run(args):
            order.append(name)
            return {"trials": {name: [{"decode_tok_s": 2.0, "ttft_s": 1.0}]}}

        return run

    monkeypatch.setattr(cpu_speed, "ours", side("skg_jax"))
    monkeypatch.setattr(cpu_speed, "theirs", side("loop"))
    output = tmp_path / "out.json"
    cpu_speed.main(["--torch-python", "python", "--gguf", "m.gguf", "--rounds", "3", "--output", str(output)])
    assert order == ["skg_jax", "loop", "loop", "skg_jax", "skg_jax", "loop"]
    record = json.loads(output.read_text())
    assert [len(record["rounds"][name]) for name in ("skg_jax", "torch")] == [3, 3]
    assert record["comparison"]["decode_tok_s"]["ratio"]["median"] == 1.0 and record["settings"]["model"] == "m.gguf"


def test_both_sides_get_the_same_numbers():
    args = cpu_speed.arguments(["--torch-python", "python", "--threads", "1", "--trials", "7"])
    assert cpu_speed.shared_flags(args) == [
        "--prompt-tokens", "1024", "--generation-tokens", "64", "--threads", "1", "--trials", "7",
    ]  # fmt: skip


def test_a_side_that_fails_says_so():
    with pytest.raises(SystemExit, match="(?s)failed:.*no such thing"):
        cpu_speed.run("python3", "-c", "raise SystemExit('no such thing')")
