"""From arguments to exit code: prepare (a mistake ends here with code 2), generate, and report whatever happened."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from skg_jax.generate import arguments
from skg_jax.generate.arguments import Arguments
from skg_jax.generate.output import Progress, check_report, footer, say, write, write_report

if TYPE_CHECKING:
    from skg_jax.engine import Result, Run

FAILED, REFUSED = 1, 2
INTERRUPTED, READER_GONE = 130, 141  # 128 + the number of SIGINT, SIGPIPE: what a shell reports


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = arguments.parse(argv)
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        return _main(args)
    except KeyboardInterrupt:  # before there was anything to report
        return INTERRUPTED


def _main(args: Arguments) -> int:
    try:
        prompt = arguments.prompt(args)
        check_report(args.report)
        run = _start(args, prompt)
    except (ValueError, OSError) as error:
        if args.debug:
            raise
        say(f"error: {_sentence(error)}")
        return REFUSED
    if not args.quiet:
        for note in run.notes:
            say(f"warning: {note}")
    code = _iterate(args, run)
    return _finish(args, run, code)


def _start(args: Arguments, prompt: str) -> Run:
    """Load the model and check the request. Raises ValueError, OSError."""
    with _at_once():
        options = arguments.options(args)
        from skg_jax import engine
        from skg_jax.engine import compile_cache

        compile_cache.enable()
        dtype = None if args.dtype == "auto" else args.dtype
        loaded = engine.load(args.model, dtype, args.tokenizer, None if args.quiet else Progress())
        return loaded.start([prompt], options)


def _iterate(args: Arguments, run: Run) -> int:
    """Generate, and print the text as it comes."""
    try:
        with _at_once():
            run.compile()
        for piece in run:
            if not args.json:
                write(piece.text)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _unwritten(error)
    except RuntimeError as error:  # of which jax's own is a kind
        if args.debug or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say("error: the device has too little memory for this request; use fewer tokens, or --dtype bfloat16.")
        return FAILED
    return 0


def _finish(args: Arguments, run: Run, code: int) -> int:
    """Print and write what there is, also of a run that was cut short."""
    result = run.results()[0]
    notes = {"warnings": list(run.notes)}
    try:
        write(_ending(args, result, notes))
    except OSError as error:
        code = _unwritten(error)
    for error in (result.error, write_report(args.report, result.to_json(attempts=True) | notes)):
        if error:
            say(f"error: {error}")
            code = code or FAILED
    if not (args.json or args.quiet or code == READER_GONE):
        for line in footer(result):
            say(line)
    return code


def _unwritten(error: OSError) -> int:
    """The exit code when stdout takes no more: quiet when its reader has gone, as after `| head`."""
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    say(f"error: stdout cannot be written: {error.strerror}.")
    return FAILED


def _ending(args: Arguments, result: Result, notes: dict) -> str:
    if args.json:
        return json.dumps(result.to_json() | notes, ensure_ascii=False, allow_nan=False) + "\n"
    return "" if result.text.endswith("\n") else "\n"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be read: {error.strerror}."
    return str(error)


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Ctrl-C ends the program here and now: Python would only notice it after minutes of loading or compiling."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
