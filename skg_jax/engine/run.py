"""One batch of requests from prompt to certificate: allocation, dispatches, stop strings, books. No policy in here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.decode import Rows, StepInfo, empty_log, first_rows
from skg_jax.decode.state import NO_TOKEN
from skg_jax.engine.options import FinishReason
from skg_jax.engine.result import Result, Timing, byte_counts, page_counts
from skg_jax.engine.text import TextRow
from skg_jax.guard import Attempt, Terms, Verdict, certify
from skg_jax.kv import cache as kv


class Piece(NamedTuple):
    """Text that a row gained."""

    row: int
    text: str


class Run:
    """Iterate over it for the text as it comes; `results()` may be asked at any time, also after an interruption."""

    def __init__(self, engine, job):
        self._engine, self._job = engine, job
        ends = frozenset() if job.options.ignore_end else engine.tokenizer.eos_ids
        self._rows = [TextRow(engine.tokenizer, job.options.stop, ends) for _ in job.prompts]
        self._attempts: list[list[Attempt]] = [[] for _ in job.prompts]
        self._finish: list[FinishReason | None] = [None] * len(job.prompts)
        self._errors: list[str | None] = [None] * len(job.prompts)
        self._itl: list[float] = []
        self._ttft = self._prefill_s = None
        self._decode_s = self._decoded = 0.0
        self.compile_s = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What the caller should know before it runs; a sentence each."""
        return self._job.notes

    def compile(self) -> None:
        """Compile now what iterating would compile first."""
        self.compile_s += self._engine.programs(self._job, self._engine.shape(self._job))[2]

    def __iter__(self) -> Iterator[Piece]:
        job, engine = self._job, self._engine
        shape = engine.shape(job)
        prefill, decode, seconds = engine.programs(job, shape)
        self.compile_s += seconds
        started = time.perf_counter()
        cache = engine.new_cache(job, shape)
        first = []
        for row, prompt in enumerate(job.prompts):
            cache, token = self.prefill_row(prefill, cache, row, prompt)
            first.append(token)
        self._ttft = self._prefill_s = time.perf_counter() - started
        yield from self._first_tokens(first)
        rows, log = self._start(first), empty_log(job.program.attempts_per_dispatch, shape.batch)
        while not all(self._finish):
            began, ended = time.perf_counter(), list(self._finish)
            cache, rows, log = decode(engine.model.params, cache, job.requests, rows, log)
            lines = jax.device_get(log)
            self._time(lines, time.perf_counter() - began)
            yield from self._absorb(lines)
            if ended != self._finish:
                rows = rows._replace(done=rows.done | jnp.asarray([bool(f) for f in self._finish]))
        self.cache = cache  # for a scrub

    def results(self) -> list[Result]:
        """State of every request, finished or not."""
        return [self._result(row) for row in range(len(self._rows))]

    def prefill_row(self, prefill, cache: kv.PagedKVCache, row: int, prompt: tuple[int, ...]):
        width = self._job.program.prefill_chunk
        for start in range(0, len(prompt), width):
            chunk = prompt[start : start + width]
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(chunk)] = chunk
            index = [jnp.int32(i) for i in (row, start, len(chunk))]
            cache, token, _ = prefill(self._engine.model.params, cache, self._job.requests, tokens, *index)
            self._engine.report_progress("prefill", start + len(chunk), len(prompt))
        return cache, int(token)

    def _first_tokens(self, first: list[int]) -> Iterator[Piece]:
        for row, token in enumerate(first):
            yield from self._take(row, token, self._job.limits[row] == 1)

    def _start(self, first: list[int]) -> Rows:
        position = [len(p) for p in self._job.prompts]
        done = jnp.asarray([bool(f) for f in self._finish])
        number = lambda values: jnp.asarray(values, jnp.int32)
        return first_rows(self._job.requests.policy, number(first), number(position), done)

    def _absorb(self, log: StepInfo) -> Iterator[Piece]:
        for line in range(log.active.shape[0]):
            for row in np.flatnonzero(log.active[line]).tolist():
                if self._finish[row] is None:
                    yield from self._one(row, attempt_of(log, line, row))

    def _one(self, row: int, attempt: Attempt) -> Iterator[Piece]:
        self._attempts[row].append(attempt)
        if attempt.token is not None:
            self._decoded += 1
            last = len(self._rows[row].tokens) + 1 >= self._job.limits[row]
            yield from self._take(row, attempt.token, last)
        elif attempt.verdict == Verdict.STOP:
            layer, block = attempt.corrupt or (-1, -1)
            self._finish[row] = "error"
            self._errors[row] = (
                f"the keys of block {block} in layer {layer} do not match their checksum, so the cache cannot be "
                "trusted; run the request again."
            )
            if text := self._rows[row].flush():
                yield Piece(row, text)

    def _take(self, row: int, token: int, last: bool) -> Iterator[Piece]:
        text, ended = self._rows[row].push(token)
        if ended or last:
            self._finish[row] = "stop" if ended else "length"
        if last and not ended:
            text += self._rows[row].flush()
        if text:
            yield Piece(row, text)

    def _time(self, log: StepInfo, seconds: float) -> None:
        stood = int((log.active & (log.token != NO_TOKEN)).any(1).sum())
        self._decode_s += seconds
        self._itl += [seconds / max(stood, 1)] * stood

    def _result(self, row: int) -> Result:
        job, engine = self._job, self._engine
        attempts, text = self._attempts[row], self._rows[row]
        terms = Terms(
            job.options.attention, job.options.guard.alpha, job.tau, job.options.guard.residual,
            job.options.guard.spending, job.uncovered, job.options.guard.scope, job.dense_below,
        )  # fmt: skip
        rate = self._decoded / self._decode_s if self._decode_s else None
        prefilled = sum(map(len, job.prompts)) / self._prefill_s if self._prefill_s else None
        return Result(
            text=text.text,
            token_ids=tuple(text.tokens),
            prompt_tokens=len(job.prompts[row]),
            finish_reason=self._finish[row] or "interrupted",
            certificate=certify(terms, attempts),
            model=engine.model.name,
            seed=job.seed,
            options=job.options,
            pages=page_counts(attempts),
            bytes=byte_counts(attempts, engine.model.config, job.options, engine.dtype.itemsize),
            timing=Timing(self._ttft, prefilled, rate, self.compile_s, tuple(self._itl)),
            attempts=tuple(attempts),
            error=self._errors[row],
        )


def attempt_of(log: StepInfo, line: int, row: int) -> Attempt:
    """One row of one line of a log, as Python numbers."""
    cell = {
        name: getattr(log, name)[line, row]
        for name in StepInfo._fields
        if name not in ("active", "token", "verdict", "corrupt")
    }
    token, place = int(log.token[line, row]), log.corrupt[line, row]
    return Attempt(
        **{name: value.item() for name, value in cell.items()},
        token=None if token == NO_TOKEN else token,
        verdict=Verdict(int(log.verdict[line, row])),
        corrupt=None if place[0] < 0 else (int(place[0]), int(place[1])),
    )
