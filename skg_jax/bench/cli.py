"""Hands the command line to the module of the command, and turns its refusals into a sentence and code 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

PROGRAM = "python -m skg_jax.bench"
COMMANDS = {
    "decode": "dense, sparse and guarded decoding side by side; with --config at a published model's size",
    "stats": "one pooled audit of a large population: the decision, and the bound inverted",
}
REFUSED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"error: there is no benchmark {name!r}.\n{usage()}", file=sys.stderr)
        return REFUSED
    module = "synthetic" if name == "decode" and any(word.partition("=")[0] == "--config" for word in rest) else name
    try:
        return importlib.import_module(f"skg_jax.bench.{module}").main(rest)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def usage() -> str:
    rows = "\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())
    return f"usage: {PROGRAM} COMMAND [OPTIONS]\n\ncommands:\n{rows}\n\n{PROGRAM} COMMAND --help lists its options."
