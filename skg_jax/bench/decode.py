"""`python -m skg_jax.bench decode`: dense, sparse and guarded decoding of the same prompts, in turns in one process."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff as Flag

from skg_jax.bench.environment import environment, limit_threads

if TYPE_CHECKING:
    from skg_jax.engine import Engine, Options

type Mode = Literal["dense", "sparse", "guarded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Time dense, sparse and guarded decoding of the same prompts, in turns, within one process.

    Prompts are English text of Python's own documentation. End tokens are ignored, so that every run has the same
    length. Compiling is not part of any time. A dispatch makes up to 16 tokens, over which its time is spread evenly:
    ITL percentiles are those of dispatches, not of single tokens.
    """

    model: str = "smollm2-135m-instruct"
    """A built-in name, a GGUF file, or a folder in the Hugging Face or orbax format."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache. auto: float32 on a CPU, bfloat16 elsewhere."""
    prompt_tokens: int = 1024
    """Length of every prompt."""
    generation_tokens: int = 128
    """Tokens to generate, the first one included."""
    batch_size: int = 1
    """Prompts in a batch."""
    trials: int = 5
    """Measured runs of each mode, each with new prompts."""
    warmup: int = 1
    """Runs of each mode that are not counted."""
    modes: tuple[Mode, ...] = ("dense", "sparse", "guarded")
    """What to time; dense is always among them."""
    selector: str = "topk"
    """Page selector."""
    pages: str = "10%"
    """Pages that each step reads first: a share (0.1 or 10%) or a number (64)."""
    page_size: int = 16
    """Tokens per page: 16, 32 or 64."""
    tau: float | None = None
    """Largest residual of a guarded step. None: the model's operating point."""
    alpha: float = 0.01
    """Error probability of a guarded request."""
    seed: int = 0
    """Of prompts and audits."""
    threads: int | None = None
    """Bind the process to this many cores."""
    json: Flag[bool] = False
    """Print one JSON object, with every trial, instead of the table."""

    def __post_init__(self):
        least = {"prompt_tokens": 1, "generation_tokens": 2, "batch_size": 1, "trials": 1, "warmup": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, not {getattr(self, name)}.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, 2**31), not {self.seed}.")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code. Raises ValueError with one sentence."""
    args = tyro.cli(Arguments, prog="python -m skg_jax.bench decode", args=argv)
    limit_threads(args.threads)
    facts = environment()
    from skg_jax import engine
    from skg_jax.bench.summary import summarize, table
    from skg_jax.engine import compile_cache

    compile_cache.enable()
    asked: dict[Mode, Options] = {mode: options(args, mode) for mode in ("dense", *args.modes)}
    loaded = engine.load(args.model, None if args.dtype == "auto" else args.dtype)
    context = loaded.model.config.max_context
    if args.prompt_tokens + args.generation_tokens > context:
        raise ValueError(
            f"prompt and generation together must fit the {context} tokens of {args.model}; ask for fewer."
        )
    trials, notes = measure(loaded, asked, args)
    summaries = {mode: summarize(trials, mode) for mode in asked}
    found = {"benchmark": "decode", "settings": dataclasses.asdict(args), "warnings": notes, "environment": facts}
    print(json.dumps(found | {"modes": summaries, "trials": trials}) if args.json else table(summaries))
    return 0


def options(args: Arguments, mode: Mode) -> Options:
    """Options of a mode, the same but for the attention. Raises ValueError."""
    from skg_jax.engine.options import Options, budget
    from skg_jax.guard import GuardConfig

    return Options(
        attention=mode,
        max_tokens=args.generation_tokens,
        selector=args.selector,
        pages=budget(args.pages),
        page_size=args.page_size,
        dense_below=0,  # what is called guarded here is guarded
        guard=GuardConfig(tau=args.tau, alpha=args.alpha),
        ignore_end=True,
    )


def measure(loaded: Engine, asked: dict[Mode, Options], args: Arguments) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of the counted trials, and what the engine notes about the requests. The modes take turns."""
    from skg_jax.bench.prompts import prompts

    encode = lambda text: loaded.tokenizer.encode(text)
    trials, notes = [], {}
    for trial in range(-args.warmup, args.trials):
        seed = args.seed + args.warmup + trial
        texts = prompts(encode, args.prompt_tokens, args.batch_size, seed)
        for mode, chosen in asked.items():
            found = _once(loaded, texts, dataclasses.replace(chosen, seed=seed), mode, trial, notes)
            if trial >= 0:
                trials.append(found)
            _say(f"{mode} {f'trial {trial + 1}' if trial >= 0 else 'warm-up'}: {found['decode_tok_s']:.1f} tok/s")
    return trials, list(notes)


def _once(loaded: Engine, texts, chosen: Options, mode: Mode, trial: int, notes: dict[str, None]) -> dict[str, Any]:
    from skg_jax.bench.summary import record

    run = loaded.start(texts, chosen)
    for note in set(run.notes) - set(notes):
        _say(f"warning: {note}")
        notes[note] = None
    run.compile()
    began = time.perf_counter()
    for _ in run:
        pass
    seconds = time.perf_counter() - began
    results = run.results()
    if failed := [r.error for r in results if r.error]:
        raise RuntimeError(failed[0])
    return record(mode, trial, seconds, results)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
