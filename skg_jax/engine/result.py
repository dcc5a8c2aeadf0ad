"""What a request gives back: text, certificate, and what was read for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from models.config import ModelConfig
from skg_jax.engine.options import FinishReason, Options
from skg_jax.guard import Attempt, Certificate
from skg_jax.types import BLOCK


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds and rates of one call; compilation is apart from all of them."""

    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    compile_s: float
    itl_s: tuple[float, ...] = dataclasses.field(
        default=(), repr=False
    )  # time per token, spread evenly over a dispatch


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished (or interrupted) request."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    certificate: Certificate
    model: str
    seed: int
    options: Options
    pages: dict[str, int | float]
    bytes: dict[str, int]
    timing: Timing
    attempts: tuple[Attempt, ...] = dataclasses.field(repr=False, default=())
    error: str | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.token_ids)

    def to_json(self, attempts: bool = False) -> dict[str, Any]:
        """A JSON object; with `attempts` the options, the tokens and every attempt as well."""
        timing = dataclasses.asdict(self.timing)
        timing.pop("itl_s")
        out = {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "attention": self.options.attention,
            "selector": self.options.selector,
            "seed": self.seed,
            "certificate": self.certificate.to_json(),
            "pages": self.pages,
            "bytes": self.bytes,
            "timing": timing,
        }
        if self.error:
            out["error"] = self.error
        if attempts:
            out["token_ids"] = list(self.token_ids)
            guard = self.options.guard.after(self.options.pages)  # with the tiers that were used
            out["options"] = dataclasses.asdict(self.options) | {"guard": dataclasses.asdict(guard)}
            out["attempts"] = [_attempt_json(a) for a in self.attempts]
        return out


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    """JSON has no infinity: a bound that says nothing is null."""
    finite = {name: value for name, value in attempt._asdict().items() if name not in ("verdict", "bound", "cap")}
    bounds = {name: value if math.isfinite(value) else None for name, value in
              (("bound", attempt.bound), ("cap", attempt.cap))}  # fmt: skip
    return finite | bounds | {"verdict": attempt.verdict.name}


def page_counts(attempts: Sequence[Attempt]) -> dict[str, int | float]:
    """Pages over all layers and KV heads.

    `total`: what dense attention would have read for the steps that stand. `selected_fraction`: mean share of the
    context that sparse attempts read. `audited_fraction`: share of the unread pages whose keys the audits read.
    `read_fraction`: everything read, repeated and exact attempts and audits included, over `total`.
    """
    sparse = [a for a in attempts if not a.exact]
    total = sum(a.total for a in attempts if a.token is not None)
    read = sum(a.selected + a.audited for a in attempts)
    unread = sum(a.units for a in sparse)
    return {
        "total": total,
        "selected_fraction": _ratio(sum(a.selected for a in sparse), sum(a.total for a in sparse)),
        "audited_fraction": _ratio(sum(a.audited for a in sparse), unread),
        "read_fraction": _ratio(read, total),
    }


def byte_counts(attempts: Sequence[Attempt], config: ModelConfig, options: Options, itemsize: int) -> dict[str, int]:
    """Logical bytes: keys and values by whole pages, sketch records of sealed blocks, keys of audited pages."""
    page = options.page_size * config.head_dim * itemsize
    record = BLOCK * config.head_dim // 2 + 4 * config.head_dim + 2 * BLOCK
    sealed = sum(a.position // BLOCK for a in attempts if not a.exact) * config.num_layers * config.num_kv_heads
    return {
        "dense_kv": 2 * page * sum(a.total for a in attempts if a.token is not None),
        "read_kv": 2 * page * sum(a.selected for a in attempts),
        "sketch": 0 if options.attention == "dense" else record * sealed,
        "audit": page * sum(a.audited for a in attempts),
    }


def _ratio(a: int, b: int) -> float:
    return a / b if b else 0.0
