"""What `bench decode --config` is asked to measure."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from models import published
from skg_jax.bench.modes import ATTEMPTS, BASELINE, GUARDED, SPARSE, TIMED, modes
from skg_jax.types import BLOCK, PAGE_SIZES

TURN = ATTEMPTS * TIMED  # timed attempts of a mode in its turn


class Cell(NamedTuple):
    """`batch x capacity [@ context] [: modes]`; a context below the capacity needs no other program or cache."""

    batch: int
    capacity: int
    context: int
    modes: tuple[str, ...]  # none: those of the command

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ValueError with one sentence for anything else."""
        match = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?(?::(.+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no cell; write 8x65536, 8x65536@4096 or 8x65536:sparse,guarded.")
        batch, capacity = int(match[1]), int(match[2])
        cell = cls(batch, capacity, int(match[3] or capacity), tuple(match[4].split(",")) if match[4] else ())
        if batch < 1 or cell.context > capacity:
            raise ValueError(f"{text!r} is no cell; a batch is at least 1, and a context no longer than the cache.")
        return cell

    @property
    def size(self) -> tuple[int, int]:
        return self.batch, self.capacity

    def steps(self, args: argparse.Namespace) -> int:
        """Timed attempts of a mode."""
        return args.steps if self.context == self.capacity else args.short_steps


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m skg_jax.bench decode", description="Decode steps at a published size."
    )
    parser.add_argument("--config", required=True, help="a published model's name")
    parser.add_argument(
        "--cells", nargs="+", default=["8x65536", "1x131072"],
        metavar="BxT[@C][:MODE,...]",
        help="batch x tokens of the cache; the context, if it is shorter; modes, if they are not those of --modes",
    )  # fmt: skip
    parser.add_argument("--modes", nargs="+", default=[BASELINE, SPARSE, GUARDED], help="see docs/benchmarks")
    parser.add_argument("--steps", type=int, default=1008, help="timed attempts of each mode in a cell")
    parser.add_argument("--short-steps", type=int, default=128, help="the same in cells with a shorter context")
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--page-size", type=int, default=16, choices=PAGE_SIZES)
    parser.add_argument("--bounds", default="sketch", choices=("sketch", "group"))
    parser.add_argument("--tau", type=float, default=0.27)
    parser.add_argument("--profile", default="smollm2-135m-instruct", help="recorded attention to reproduce")
    parser.add_argument("--dense-layers", type=int, default=8, help="contiguous caches that all layers share in turn")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a trial")
    parser.add_argument("--trace", action="store_true", help="kernels and copies of one dispatch of each mode")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    args = parser.parse_args(argv)
    if min(args.steps, args.short_steps) < TURN:
        raise ValueError(f"steps must be at least {TURN}, one turn, not {min(args.steps, args.short_steps)}.")
    if not 0 < args.pages < 1 or (args.layers is not None and args.layers < 1) or args.dense_layers < 1:
        raise ValueError("pages must lie between 0 and 1, and layers and dense-layers be at least 1.")
    if args.output and not args.output.parent.is_dir():
        raise ValueError(f"{args.output} cannot be written: there is no folder {args.output.parent}.")
    cells = [Cell.parse(text) for text in args.cells]
    args.cells = [cell._replace(modes=cell.modes or tuple(args.modes)) for cell in cells]
    known = [BASELINE, *modes(published.get(args.config), args.page_size, args.bounds)]
    if unknown := [name for cell in args.cells for name in cell.modes if name not in known]:
        raise ValueError(f"there is no mode {unknown[0]!r}; choose among {', '.join(known)}.")
    args.steps, args.short_steps = (-(-n // TURN) * TURN for n in (args.steps, args.short_steps))
    for cell in args.cells:
        if cell.context < cell.steps(args) + 2 * BLOCK:
            raise ValueError(f"{cell.context} tokens leave no room for {cell.steps(args)} steps; ask for fewer.")
    return args
