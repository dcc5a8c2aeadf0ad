"""What a caller of the engine may ask for, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from skg_jax.decode import Mode
from skg_jax.guard import GuardConfig
from skg_jax.selectors import get
from skg_jax.types import PAGE_SIZES


class RequestError(ValueError):
    """A request that cannot be served as asked; the message is one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one `generate` call.

    Attributes:
      max_tokens: most tokens to generate; cut to what the context leaves.
      attention: "guarded", sparse with audit and certificate; "sparse", without; "dense", exact.
      selector: name of the page selector. pages: its first budget, below 1 a fraction (for topp: the mass to keep),
        from 1 up a count.
      page_size: tokens per page, 16, 32 or 64.
      guard: see GuardConfig.
      dense_below: a guarded step over fewer tokens of context is exact, because dense attention is faster there. None:
        the crossover measured for this device, model, batch size, selector and budget, and 0 where there is none
        (skg_jax/guard/crossover.json); 0: no such step. Ignored by "sparse" and "dense".
      temperature, top_k, top_p, min_p: sampling; temperature 0 is greedy.
      seed: of tokens and audits; None draws one from the operating system. Equal seeds give equal tokens and audited
        pages.
      stop: strings that end the text, not included in it.
      ignore_end: go on past end tokens, to time a fixed number of tokens.
      system: system message of the chat template. raw: the prompt as it is, without template.

    Raises:
      RequestError: if a field is out of range.
    """

    max_tokens: int = 256
    attention: Mode = "guarded"
    selector: str = "topk"
    pages: float = 0.1
    page_size: int = 16
    guard: GuardConfig = GuardConfig()
    dense_below: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    system: str | None = None
    raw: bool = False

    def __post_init__(self):
        self._check_types()
        get(self.selector)
        checks = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}."),
            (
                self.attention in ("dense", "sparse", "guarded"),
                f"attention must be dense, sparse or guarded, not {self.attention!r}.",
            ),
            (self.pages > 0 and math.isfinite(self.pages), f"pages must be a positive number, not {self.pages}."),
            (self.pages < 1 or self.pages % 1 == 0, f"pages counts whole pages from 1 up, not {self.pages}."),
            (
                self.selector != "topp" or self.pages < 1,
                f"with topp, pages is the mass to keep and below 1, not {self.pages}.",
            ),
            (self.page_size in PAGE_SIZES, f"page_size must be one of {PAGE_SIZES}, not {self.page_size}."),
            (
                self.dense_below is None or self.dense_below >= 0,
                f"dense_below must be at least 0 tokens (0: never), not {self.dense_below}.",
            ),
            (
                self.temperature >= 0 and math.isfinite(self.temperature),
                f"temperature must be at least 0, not {self.temperature}.",
            ),
            (self.top_k >= 0, f"top_k must be at least 0 (0: off), not {self.top_k}."),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}."),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], not {self.min_p}."),
            (self.seed is None or 0 <= self.seed < 2**32, f"seed must be in [0, 2**32), not {self.seed}."),
            (all(self.stop), "a stop string must not be empty."),
        ]
        for ok, sentence in checks:
            if not ok:
                raise RequestError(sentence)

    def _check_types(self) -> None:
        kinds = {
            "a whole number": (("max_tokens", "top_k", "page_size"), int),
            "a whole number or None": (("seed", "dense_below"), int | None),
            "a number": (("pages", "temperature", "top_p", "min_p"), int | float),
            "a GuardConfig": (("guard",), GuardConfig),
        }
        for what, (names, kind) in kinds.items():
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise RequestError(f"{name} must be {what}, not {value!r}.")

    @property
    def greedy(self) -> bool:
        """No draw needed."""
        return self.temperature == 0


def budget(text: str) -> float:
    """A page budget as people write it: `0.1` or `10%` of the pages, or `64` of them.

    Raises:
      RequestError: if it is neither, or 100% and more.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number)
    except ValueError as error:
        raise RequestError(f"{text!r} is no page budget; write 0.1 or 10% for a share, 64 for a count.") from error
    if percent and value >= 100:
        raise RequestError(f"a page budget of {text} is dense attention; ask for that, or for less than 100%.")
    return value / 100 if percent else value


type FinishReason = Literal["stop", "length", "interrupted", "error"]
