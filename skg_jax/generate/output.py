"""What people and programs see: text, progress, the footer, the report. Nothing in here fails on a closed stream."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skg_jax.generate.arguments import UsageError

if TYPE_CHECKING:
    from skg_jax.engine import Result


def say(line: str) -> None:
    """A line on stderr, if there is one: print would take stdout for it."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:  # its reader went away
        pass


def write(text: str) -> None:
    """Text on stdout, at once. Raises OSError, and keeps Python from raising it again at its end."""
    try:
        print(text, end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


class Progress:
    """A bar on stderr per stage, if stderr is a terminal; gone when the stage is over."""

    LABELS = {"load": "Loading", "compile": "Compiling, once per size", "prefill": "Reading the prompt"}

    def __init__(self):
        self._stage, self._bar = "", None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if stage != self._stage:
            self._start(stage, total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._stage, self._bar = "", None

    def _start(self, stage: str, total: int) -> None:
        from tqdm import tqdm

        self.close()
        self._stage = stage
        shape = "{l_bar}{bar}| {elapsed}"
        self._bar = tqdm(total=total, desc=self.LABELS[stage], leave=False, file=sys.stderr, bar_format=shape)


def footer(result: Result) -> list[str]:
    """Statistics and certificate, a line each."""
    time, certificate = result.timing, result.certificate
    wait = f"first token after {_seconds(time.ttft_s)}"
    rows = {
        "prompt": f"{result.prompt_tokens} tokens{_rate(time.prefill_tok_s)}, {wait}",
        "decode": f"{result.generated_tokens} tokens{_rate(time.decode_tok_s)}, ended by {result.finish_reason}",
        "compile": _seconds(time.compile_s),
        "pages": _pages(result.pages),
        "steps": f"{certificate.steps}: {certificate.accepted} accepted, {certificate.fallback} exact, "
        f"{certificate.uncertified} uncertified; {certificate.expanded} tries repeated with more pages",
        "crossover": certificate.crossover,
        "certificate": certificate.statement,
        "scope": f"{certificate.scope}; {certificate.reason or 'nothing weakens it'}",
        "seed": str(result.seed),
    }
    return [f"{name + ':':<13}{value}" for name, value in rows.items() if value]


def _pages(pages: dict[str, int | float]) -> str:
    read = f"{pages['read_fraction']:.1%} of what dense attention reads"
    if not pages["selected_fraction"]:
        return read
    selected, audited = f"{pages['selected_fraction']:.1%}", f"{pages['audited_fraction']:.1%}"
    return f"{read}; sparse attempts selected {selected}, audits read {audited} of the rest"


def _rate(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f" at {tokens_per_second:.1f} tok/s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def check_report(path: Path | None) -> None:
    """Find out before the run whether the report can be written; what stands there is left alone. Raises UsageError."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"the report cannot be written to {path}: {error.strerror}.") from error


def write_report(path: Path | None, record: dict[str, Any]) -> str | None:
    """Write the report; a sentence when that fails after all."""
    if path is None:
        return None
    try:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        return f"the report cannot be written to {path}: {error.strerror}."
    return None
