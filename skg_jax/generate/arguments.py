"""The command line as dataclasses. No jax in here: a mistyped flag is refused at once.

Fields called as in `Options` and `GuardConfig` go there as they are; what values are allowed is decided there alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff as Flag
from tyro.conf import UseAppendAction as Repeatable

if TYPE_CHECKING:
    from skg_jax.engine import Options

PROGRAM = "python -m skg_jax.generate"


class UsageError(ValueError):
    """A command line that cannot be followed; the message is one sentence."""


def _maybe(convert: Callable[[str], Any], metavar: str):
    """A flag that may be left out. tyro would read the word None as absent, but None may be meant."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: convert(words[0]),
        is_instance=lambda value: value is None or isinstance(value, convert),  # type: ignore[arg-type]
        str_from_instance=lambda value: ["unset" if value is None else str(value)],
    )


type Text = Annotated[str | None, _maybe(str, "TEXT")]
type Number = Annotated[float | None, _maybe(float, "FLOAT")]
type Count = Annotated[int | None, _maybe(int, "INT")]
type File = Annotated[Path | None, _maybe(Path, "PATH")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """What the certificate has to promise (only with --attention guarded)."""

    tau: Number = None
    """Largest residual of a step that is let through. Unset: the model's operating point."""
    alpha: float = 0.01
    """Error probability of the whole request."""
    max_steps: Count = None
    """Decode steps that alpha is split over. Unset: as many as the request may take."""
    spare_attempts: Count = None
    """Audited repetitions beyond one attempt per step. Unset: a quarter of the steps, at least 8."""
    spending: Literal["uniform", "ledger"] = "uniform"
    """Equal shares of alpha, or shares per fallback above an equal floor."""
    tiers: tuple[str, ...] = ("auto",)
    """Page budgets tried after --pages, ascending, then exact attention. auto: two and a half times --pages."""
    on_reject: Literal["exact", "release"] = "exact"
    """After the last tier: exact attention, or the step as it is, without a certificate."""
    scope: Literal["step", "heads"] = "step"
    """What tau limits: the weighted mean over all heads of a step, or every head by itself."""
    residual: Literal["mass", "output"] = "mass"
    """Attention mass dropped, or a bound on the relative change of the attention output."""
    weights: str = "uniform"
    """Of the heads in the residual: uniform, gain, or a JSON file with a [layers][heads] table."""
    audit_rate: float = 0.01
    """Share of the unread pages that the first audit round draws."""
    rounds: tuple[int, ...] = (1, 1, 2)
    """Sizes of the audit rounds, in multiples of the first."""
    design: Literal["pps", "wor", "boundary"] = "pps"
    """How pages are drawn; all but pps are for comparison."""
    bounds: Literal["sketch", "group", "box"] = "sketch"
    """Source of the bounds on unread pages: a norm per token, or one per block; box is for comparison."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Generate text with page-sparse attention, and say how much attention was left out.

    The text goes to stdout, statistics and the certificate to stderr. Exit code: 0, or 1 when a request could not be
    finished, 2 when it could not be started, 130 after Ctrl-C, 141 when the reader of stdout went away.

    Compiled programs are kept in ~/.cache/skg_jax/compiled, so that later runs start sooner; $SKG_COMPILE_CACHE names
    another folder, or is `off`. $SKG_MODELS is a folder with models that --model finds by name.
    """

    prompt: Text = None
    """The prompt, or - to read it from stdin. A text that begins with a dash: --prompt=-1."""
    prompt_file: File = None
    """Read the prompt from a file. One line break at its end is dropped, as for stdin."""
    system: Text = None
    """System message."""
    raw: Flag[bool] = False
    """The prompt as it is, without the model's chat template."""

    model: str = "smollm2-135m-instruct"
    """A built-in name, a GGUF file, or a folder in the Hugging Face or orbax format."""
    tokenizer: File = None
    """Folder with another tokenizer.json."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and cache. auto: float32 on a CPU, bfloat16 elsewhere."""

    max_tokens: int = 256
    """Most tokens to generate."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the fewest tokens that hold this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: Count = None
    """Of tokens and audits. Unset: drawn, and printed at the end."""
    stop: Repeatable[tuple[str, ...]] = ()
    """End at this string, and leave it out."""

    attention: Literal["dense", "sparse", "guarded"] = "guarded"
    """Exact; sparse without an audit; or sparse, audited and repeated where the audit is not content."""
    selector: str = "topk"
    """Page selector: topk, topp or dense."""
    pages: str = "10%"
    """Pages that each step reads first: a share (0.1 or 10%) or a number (64). For topp: the mass to keep."""
    page_size: int = 16
    """Tokens per page: 16, 32 or 64."""
    dense_below: Count = None
    """Exact steps below so many tokens of context, where dense attention is faster; 0: none. Unset: as measured."""
    guard: Guard = Guard()

    report: File = None
    """Write the full record, with every attempt, to this JSON file."""
    json: Flag[bool] = False
    """Print one JSON object instead of text and statistics."""
    quiet: Flag[bool] = False
    """No statistics, warnings or progress: nothing on stderr but errors."""
    debug: Flag[bool] = False
    """Show the traceback of an error."""


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """The command line; what it does not know ends the program with code 2."""
    return tyro.cli(Arguments, prog=PROGRAM, args=argv)


def options(args: Arguments) -> Options:
    """Checked options of the engine; imports jax. Raises ValueError with one sentence."""
    from skg_jax.engine.options import Options, budget
    from skg_jax.guard import GuardConfig

    pages, tiers = budget(args.pages), args.guard.tiers
    chosen = None if tiers == ("auto",) else tuple(map(budget, tiers))
    guard: dict[str, Any] = vars(args.guard) | {"tiers": chosen}
    same = {f.name: getattr(args, f.name) for f in dataclasses.fields(Options) if hasattr(args, f.name)}
    changed: dict[str, Any] = {"pages": pages, "guard": GuardConfig(**guard)}
    return Options(**(same | changed))


def prompt(args: Arguments) -> str:
    """The text of the prompt, wherever it comes from. Raises UsageError."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise UsageError("give one prompt: --prompt TEXT, --prompt - to read stdin, or --prompt-file PATH.")
    for name, value in (("prompt", args.prompt), ("system message", args.system), ("stop string", "".join(args.stop))):
        if value is not None and not _is_text(value):
            raise UsageError(f"the {name} is not valid UTF-8; use a UTF-8 terminal or a file.")
    if args.prompt_file is not None:
        return _read(str(args.prompt_file), args.prompt_file.read_bytes)
    if args.prompt != "-":
        return str(args.prompt)
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("--prompt - reads stdin, which is closed; give the text or --prompt-file PATH.")
    return _read("stdin", sys.stdin.buffer.read)


def _is_text(value: str) -> bool:
    """Not so for an argument whose bytes Python could not decode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(name: str, read: Callable[[], bytes]) -> str:
    """Text without the line break that editors and `echo` add."""
    try:
        return read().decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise UsageError(f"the prompt cannot be read from {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {name} is not valid UTF-8; convert it first.") from error
