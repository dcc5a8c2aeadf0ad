"""Long prompts from the running Python's own standard library: real text that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Held-in modules set the operating points; held-out ones are for tests and tables, and never choose anything.
HELD_IN = (
    "argparse", "ast", "asyncio/base_events", "calendar", "collections/__init__", "configparser", "csv", "dataclasses",
    "datetime", "difflib", "doctest", "enum",
)  # fmt: skip
HELD_OUT = (
    "ftplib", "functools", "gettext", "heapq", "http/client", "imaplib", "inspect", "ipaddress", "json/decoder",
    "logging/__init__", "mailbox", "optparse", "pathlib", "pickle", "shutil", "smtplib", "statistics", "tarfile",
    "textwrap", "typing", "unittest/mock", "uuid", "zipfile/__init__",
)  # fmt: skip


def module_text(name: str) -> str:
    """Source of one standard library module."""
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")


def prompt_ids(tokenizer, names: tuple[str, ...], start: int, length: int) -> list[int]:
    """`length` token ids of the modules, beginning with number `start` and wrapping around."""
    ids: list[int] = []
    for name in (names[start:] + names[:start]) * 2:
        if len(ids) >= length:
            break
        ids += tokenizer.encode(module_text(name), add_special=False)
    return ids[:length]
