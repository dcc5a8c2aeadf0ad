"""`python -m skg_jax.generate`: what goes where, every refusal, and ends that come early."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import skg_jax.engine
from models import registry
from skg_jax.engine import Options
from skg_jax.generate import arguments, cli, output
from skg_jax.guard import GuardConfig
from tests.engine import tiny

DENSE = ("--attention", "dense", "--max-tokens", "60", "--seed", "1")
TEXT = ("--prompt", tiny.TEXT)
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Programs of tests stay out of the user's folder."""
    monkeypatch.setenv("SKG_COMPILE_CACHE", "off")


@pytest.fixture
def shared(monkeypatch):
    """Every model is the tiny one, loaded and compiled once for all tests."""
    engine = tiny.engine()
    monkeypatch.setattr(skg_jax.engine, "load", lambda *_: engine)


@pytest.fixture
def run(capsys):
    """Exit code, stdout and stderr of a command line."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def expected():
    """What the engine gives for DENSE and TEXT."""
    return tiny.engine().generate(tiny.TEXT, Options(attention="dense", max_tokens=60, seed=1))


# -- what goes where --------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_statistics_to_stderr(shared, run, expected):
    code, out, err = run(*TEXT, *DENSE)
    assert (code, out) == (0, expected.text + "\n")
    rows = dict(line.split(":", 1) for line in err.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    assert rows["prompt"].startswith(f"{expected.prompt_tokens} tokens at ") and "first token after" in rows["prompt"]
    assert rows["decode"].startswith("60 tokens at ") and rows["decode"].endswith("ended by length")
    assert rows["pages"] == "100.0% of what dense attention reads"
    assert rows["steps"] == "59: 0 accepted, 59 exact, 0 uncertified; 0 tries repeated with more pages"
    assert rows["certificate"] == "Every step (59) used exact attention."
    assert (rows["scope"], rows["seed"]) == ("request; nothing weakens it", "1")
    assert rows["compile"].endswith(" s")


def test_text_is_printed_as_it_comes(shared, monkeypatch):
    pieces = []
    monkeypatch.setattr(cli, "write", pieces.append)
    cli.main([*TEXT, *DENSE])
    assert len(pieces) > 20


def test_guarded_json_is_one_object_with_the_certificate(shared, run):
    mixed = ("--pages", "30%", "--guard.tau", "0.5", "--max-tokens", "40", "--seed", "1")
    code, out, err = run(*TEXT, *mixed, "--json")
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    certificate = record["certificate"]
    assert (certificate["scope"], certificate["tau"], certificate["alpha"]) == ("request", 0.5, 0.01)
    assert certificate["steps"] == 39 == certificate["accepted"] + certificate["fallback"]
    assert min(certificate[name] for name in ("accepted", "expanded", "fallback")) > 0
    assert 0 < certificate["mean_bound"] <= certificate["worst_bound"] <= 0.5
    assert (record["attention"], record["selector"], record["seed"], record["warnings"]) == ("guarded", "topk", 1, [])
    assert 0 < record["pages"]["selected_fraction"] < 0.75 and record["bytes"]["audit"] > 0


def test_steps_below_the_crossover_are_reported(shared, run, expected):
    flags = ("--pages", "30%", "--guard.tau", "0.5", "--max-tokens", "40", "--seed", "1", "--dense-below")
    below = expected.prompt_tokens + 5
    code, _, err = run(*TEXT, *flags, str(below))
    told = f"Attention was exact in 4 of the 39 steps because their context was below {below:,} tokens."
    assert code == 0 and f"crossover:   {told}" in err.splitlines()
    certificate = json.loads(run(*TEXT, *flags, str(below), "--json")[1])["certificate"]
    assert (certificate["short"], certificate["dense_below"]) == (4, below)
    assert "crossover" not in run(*TEXT, *flags, "0")[2]


def test_the_report_holds_every_attempt(shared, run, tmp_path, expected):
    report = tmp_path / "report.json"
    report.write_text("old")
    assert run(*TEXT, *DENSE, "--quiet", "--report", str(report)) == (0, expected.text + "\n", "")
    record = json.loads(report.read_text())
    assert record["token_ids"] == list(expected.token_ids) and len(record["attempts"]) == 59
    assert record["options"]["max_tokens"] == 60


def test_the_prompt_comes_from_a_file_or_stdin(shared, run, tmp_path, monkeypatch, expected):
    file = tmp_path / "prompt.txt"
    file.write_bytes(tiny.TEXT.encode() + b"\r\n")
    assert run("--prompt-file", str(file), *DENSE)[:2] == (0, expected.text + "\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(tiny.TEXT.encode() + b"\n")))
    assert run("--prompt", "-", *DENSE)[:2] == (0, expected.text + "\n")


def test_flags_reach_the_engine(shared, monkeypatch):
    seen = []
    monkeypatch.setattr(tiny.engine(), "start", lambda prompts, options: seen.append((prompts, options)) or 1 / 0)
    argv = (
        "--prompt None --system S --raw --max-tokens 7 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 5 "
        "--stop a --stop b --attention sparse --selector topp --pages 40% --page-size 32 --dense-below 300 "
        "--guard.tau 0.2 "
        "--guard.alpha 0.05 --guard.max-steps 9 --guard.spare-attempts 2 --guard.spending ledger --guard.tiers 50% 0.6 "
        "--guard.on-reject release --guard.residual output --guard.weights gain --guard.audit-rate 0.02 "
        "--guard.rounds 1 3 --guard.design wor --guard.bounds box"
    )
    with pytest.raises(ZeroDivisionError):
        cli.main(argv.split())
    guard = GuardConfig(
        tau=0.2, alpha=0.05, max_steps=9, spare_attempts=2, spending="ledger", tiers=(0.5, 0.6), on_reject="release",
        residual="output", weights="gain", audit_rate=0.02, rounds=(1, 3), design="wor", bounds="box",
    )  # fmt: skip
    options = Options(
        system="S", raw=True, max_tokens=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=5, stop=("a", "b"),
        attention="sparse", selector="topp", pages=0.4, page_size=32, dense_below=300, guard=guard,
    )  # fmt: skip
    assert seen == [(["None"], options)]


@pytest.mark.parametrize("ours, theirs", [(arguments.Arguments, Options), (arguments.Guard, GuardConfig)])
def test_flags_are_the_fields_of_the_engine(ours, theirs):
    """Names, defaults and choices: written twice, so that flags are parsed without jax."""
    flags = {f.name: f for f in dataclasses.fields(ours)}
    fields = {f.name: f for f in dataclasses.fields(theirs) if f.name != "ignore_end"}  # for benchmarks only
    assert fields.keys() <= flags.keys()
    special = {"pages", "tiers", "guard"}
    for name in fields.keys() - special:
        assert flags[name].default == fields[name].default, name
    choices = lambda cls, name: typing.get_args(getattr(hint := typing.get_type_hints(cls)[name], "__value__", hint))
    for name in {"attention", "spending", "on_reject", "residual", "design", "bounds"} & fields.keys():
        assert set(choices(ours, name)) == set(choices(theirs, name)), name


def test_defaults_are_those_of_the_engine():
    args = arguments.parse([])
    assert args.model == registry.DEFAULT
    assert arguments.options(args) == Options()


def test_parsing_imports_no_jax():
    code = "import sys; from skg_jax.generate import cli; cli.arguments.parse([]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -- refusals: a sentence, code 2, nothing loaded ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ((), "give one prompt: --prompt TEXT, --prompt - to read stdin, or --prompt-file PATH."),
        (("--prompt", "a", "--prompt-file", "b"), "give one prompt: --prompt TEXT"),
        (("--prompt-file", "not/there"), "the prompt cannot be read from not/there: No such file or directory."),
        (("--prompt", "\udcff"), "the prompt is not valid UTF-8"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens must be at least 1, not 0."),
        (("--prompt", "a", "--temperature", "-1"), "temperature must be at least 0, not -1.0."),
        (("--prompt", "a", "--temperature", "nan"), "temperature must be at least 0, not nan."),
        (("--prompt", "a", "--temperature", "inf"), "temperature must be at least 0, not inf."),
        (("--prompt", "a", "--top-k", "-3"), "top_k must be at least 0 (0: off), not -3."),
        (("--prompt", "a", "--top-p", "0"), "top_p must be in (0, 1], not 0.0."),
        (("--prompt", "a", "--min-p", "2"), "min_p must be in [0, 1], not 2.0."),
        (("--prompt", "a", "--seed", "-1"), "seed must be in [0, 2**32), not -1."),
        (("--prompt", "a", "--stop", ""), "a stop string must not be empty."),
        (("--prompt", "a", "--pages", "0"), "pages must be a positive number, not 0.0."),
        (("--prompt", "a", "--pages", "-5%"), "pages must be a positive number, not -0.05."),
        (("--prompt", "a", "--pages", "few"), "'few' is no page budget; write 0.1 or 10% for a share, 64 for a count."),
        (("--prompt", "a", "--dense-below", "-1"), "dense_below must be at least 0 tokens (0: never), not -1."),
        (("--prompt", "a", "--page-size", "17"), "page_size must be one of (16, 32, 64), not 17."),
        (("--prompt", "a", "--selector", "best"), "unknown selector 'best'; choose one of"),
        (("--prompt", "a", "--guard.tau", "0"), "tau must be a positive number, not 0.0."),
        (("--prompt", "a", "--guard.tau", "-0.1"), "tau must be a positive number, not -0.1."),
        (("--prompt", "a", "--guard.tau", "nan"), "tau must be a positive number, not nan."),
        (("--prompt", "a", "--guard.alpha", "0"), "alpha must be strictly between 0 and 1, not 0.0."),
        (("--prompt", "a", "--guard.alpha", "1"), "alpha must be strictly between 0 and 1, not 1.0."),
        (("--prompt", "a", "--guard.alpha", "nan"), "alpha must be strictly between 0 and 1, not nan."),
        (("--prompt", "a", "--guard.audit-rate", "-1"), "rate must be in (0, 1], not -1.0."),
        (("--prompt", "a", "--guard.max-steps", "0"), "max_steps must be at least 1, not 0."),
        (("--prompt", "a", "--guard.tiers", "50%", "20%"), "tiers must be positive, finite and strictly increasing"),
        (
            ("--prompt", "a", "--report", "no/folder/r.json"),
            "the report cannot be written to no/folder/r.json: No such",
        ),
        (("--prompt", "a", "--report", "."), "the report cannot be written to .: Is a directory."),
    ],
)
def test_a_bad_argument_is_refused_before_a_model_is_loaded(run, monkeypatch, argv, sentence):
    monkeypatch.setattr(skg_jax.engine, "load", lambda *_: pytest.fail("loaded a model"))
    _refused(run(*argv), sentence)


def _refused(answer: tuple[int, str, str], sentence: str) -> None:
    code, out, err = answer
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {sentence}") and err.endswith(".\n")


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (("--prompt", ""), "the prompt is empty; give some text."),
        (("--prompt", " \n\t"), "the prompt is empty; give some text."),
        (("--prompt", tiny.TEXT * 2), "the prompt has 740 tokens, but tiny holds 511 at most; shorten it."),
        (("--prompt", "a", "--guard.tiers", "5%"), "every tier must exceed the first page budget 0.1"),
        (("--prompt", "a", "--guard.weights", "no.json"), "head weights: cannot read a table of numbers from no.json"),
    ],
)
def test_a_request_that_does_not_fit_the_model_is_refused(shared, run, argv, sentence):
    _refused(run(*argv), sentence)


def test_the_prompt_of_a_file_must_be_text(run, tmp_path):
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff\xfe")
    _refused(run("--prompt-file", str(file)), f"the prompt in {file} is not valid UTF-8; convert it first.")


def test_models_that_cannot_be_loaded_are_refused(run, tmp_path, monkeypatch):
    ask = lambda model: run("--prompt", "a", "--model", str(model))
    _refused(ask("no/such/model"), "There is no model at no/such/model; give a path, or one of the names smollm2")
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"GGUF\x03\0\0\0")
    _refused(ask(whole), f"{whole}")
    name = "qwen2.5-coder-0.5b-instruct"
    (tmp_path / f"{name}.gguf").write_bytes(b"GGUF something else")
    monkeypatch.setenv("SKG_MODELS", str(tmp_path))
    _refused(ask(name), f"{tmp_path / name}.gguf is not {name}: its SHA-256 is ")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    _refused(ask(tmp_path), "")
    config = json.loads((tiny.folder() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architecture": "mamba"}))
    _refused(ask(tmp_path), "architecture is 'mamba', but only llama and qwen2 are implemented.")


def test_a_refused_run_leaves_an_old_report_alone_and_no_new_one(run, tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("results of a whole night")
    for report in (old, new):
        _refused(run("--prompt", "a", "--model", "no/model", "--report", str(report)), "There is no model")
    assert old.read_text() == "results of a whole night" and not new.exists()


def test_closed_stdin_is_refused(run, monkeypatch):
    sentence = "--prompt - reads stdin, which is closed; give the text or --prompt-file PATH."
    for stdin in (None, io.TextIOWrapper(io.BytesIO())):
        if stdin is not None:
            stdin.close()
        monkeypatch.setattr(sys, "stdin", stdin)
        _refused(run("--prompt", "-"), sentence)
    command = ["sh", "-c", f"exec {sys.executable} -m skg_jax.generate --prompt - <&-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    _refused((done.returncode, done.stdout, done.stderr), sentence)


@pytest.mark.parametrize("argv", [("--bogus",), ("--seed", "x"), ("--attention", "none"), ("--guard.tau", "much")])
def test_what_is_no_flag_is_refused_by_the_parser(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "") and argv[0] in err


def test_debug_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="alpha must be strictly between"):
        cli.main(["--prompt", "a", "--guard.alpha", "2", "--debug"])


# -- warnings, and ends that come early -------------------------------------------------------------------------------


def test_warnings_are_said_once_and_not_with_quiet(shared, run):
    argv = ("--prompt", tiny.TEXT[:550], "--max-tokens", "4000", "--seed", "1", "--raw")
    code, _, err = run(*argv)
    lines = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert code == 0 and len(lines) == 2
    assert "max_tokens is cut from 4000 to " in lines[0] and "no operating point is known for tiny" in lines[1]
    code, out, err = run(*argv, "--quiet", "--json")
    assert (code, err) == (0, "")
    assert [f"warning: {line}" for line in json.loads(out)["warnings"]] == lines


def test_ctrl_c_prints_the_certificate_of_what_there_is(shared, run, tmp_path, monkeypatch, expected):
    count = 0

    def write(text: str) -> None:
        nonlocal count
        count += 1
        output.write(text)
        if count == 10:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "write", write)
    code, out, err = run(*TEXT, *DENSE, "--report", str(tmp_path / "r.json"))
    assert code == 130
    assert 10 <= len(out) < len(expected.text) and expected.text.startswith(out.rstrip("\n"))
    assert "ended by interrupted" in err and "used exact attention" in err
    assert json.loads((tmp_path / "r.json").read_text())["finish_reason"] == "interrupted"


def test_ctrl_c_before_the_first_token_is_quiet(shared, run, monkeypatch):
    monkeypatch.setattr(skg_jax.engine, "load", lambda *_: signal.raise_signal(signal.SIGTERM))
    signal_was = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what Ctrl-C does outside of loading
    try:
        assert run("--prompt", "a") == (130, "", "")
    finally:
        signal.signal(signal.SIGTERM, signal_was)


def test_while_loading_and_compiling_ctrl_c_needs_no_python():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyError), cli._at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_closed_pipe_is_quiet(shared, capsys, tmp_path, monkeypatch, flags):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = cli.main([*TEXT, *DENSE, *flags, "--report", str(tmp_path / "r.json")])
        stdout.flush()  # as Python does at its end
    assert (code, capsys.readouterr().err) == (141, "")
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["finish_reason"] == ("length" if flags else "interrupted")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device of Linux")
def test_a_full_disk_is_a_sentence_and_the_certificate_still_comes(shared, capsys, monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = cli.main([*TEXT, *DENSE])
    lines = capsys.readouterr().err.splitlines()
    assert (code, lines[0]) == (1, "error: stdout cannot be written: No space left on device.")
    assert any(line.startswith("certificate: ") for line in lines[1:])


def test_without_stderr_stdout_stays_clean(shared, capsys, monkeypatch, expected):
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main([*TEXT, *DENSE]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_an_integrity_stop_keeps_the_text_and_says_why(shared, run, monkeypatch):
    engine = tiny.engine()
    programs = engine.programs

    def corrupting(job, shape):
        prefill, decode, seconds = programs(job, shape)
        return prefill, lambda params, cache, *rest: decode(params, cache._replace(k=cache.k + 1), *rest), seconds

    monkeypatch.setattr(engine, "programs", corrupting)
    code, out, err = run(*TEXT, "--guard.tau", "1e-6", "--max-tokens", "40", "--seed", "1")
    lines = err.splitlines()
    assert code == 1 and len(out) > 1
    assert lines[0].startswith("error: the keys of block ") and lines[0].endswith("run the request again.")
    assert any(line.startswith("certificate: No guarantee is given") for line in lines)
    code, out, _ = run(*TEXT, "--guard.tau", "1e-6", "--max-tokens", "40", "--seed", "1", "--json")
    assert code == 1 and json.loads(out)["finish_reason"] == "error"


def test_too_little_memory_is_a_sentence_and_a_fault_is_not(shared, run, monkeypatch):
    def fail(message):
        def new_cache(job, shape):
            raise RuntimeError(message)

        monkeypatch.setattr(tiny.engine(), "new_cache", new_cache)

    fail("RESOURCE_EXHAUSTED: Out of memory")
    code, out, err = run(*TEXT, *DENSE)
    assert (code, out) == (1, "\n") and err.startswith("error: the device has too little memory for this request")
    fail("INTERNAL: something else")
    with pytest.raises(RuntimeError, match="something else"):
        run(*TEXT, *DENSE)


def test_a_report_that_fails_after_all_is_said(shared, run, tmp_path, monkeypatch, expected):
    monkeypatch.setattr(cli, "check_report", lambda path: None)
    code, out, err = run(*TEXT, *DENSE, "--report", str(tmp_path / "no" / "r.json"))
    assert (code, out) == (1, expected.text + "\n")
    assert "error: the report cannot be written to" in err and "certificate:" in err


def test_progress_is_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def watch(stream):
        progress = output.Progress()
        for stage, total in (("load", 100), ("compile", 2), ("prefill", 700)):
            for done in range(0, total + 1, max(total // 2, 1)):
                progress(stage, done, total)
        progress.close()
        return stream.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream := Terminal())
        shown = watch(stream)
        assert all(label in shown for label in output.Progress.LABELS.values())
        assert shown.rsplit("\r", 1)[1] == ""  # the line is left empty
        patch.setattr(sys, "stderr", stream := io.StringIO())
        assert watch(stream) == ""


def test_the_command_loads_a_model_and_generates(tmp_path, expected):
    """In a process of its own, from disk, with programs kept for the next time."""
    cache = tmp_path / "programs"
    environ = os.environ | {
        "SKG_COMPILE_CACHE": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-m", "skg_jax.generate", "--model", str(tiny.folder()), *TEXT, *DENSE, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["text"], record["model"], record["generated_tokens"]) == (expected.text, "tiny", 60)
    assert any("decode_loop" in file.name for file in cache.iterdir())
