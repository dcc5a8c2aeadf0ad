"""The context below which dense attention is faster than guarded sparse attention, where it was measured."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def crossover(device: str, model: str, batch: int, pages: float, page_size: int) -> int:
    """Tokens of context from which on a guarded step is faster than a dense one; 0 if nobody measured it.

    Of the batch sizes measured, the largest that is not above `batch` counts, or else the smallest.

    Args:
      device: its kind, as jax names it. model: name of the published model of these sizes (`models.published`).
      pages: first page budget. page_size: tokens per page.
    """
    wanted = {"device": device, "config": model, "pages": pages, "page_size": page_size}
    found = {row["batch"]: row["tokens"] for row in table() if wanted.items() <= row.items()}
    if not found:
        return 0
    return found[max((known for known in found if known <= batch), default=min(found))]


def table() -> list[dict[str, Any]]:
    """Measured rows, each with the file that it was taken from (`source`)."""
    return json.loads(resources.files("skg_jax.guard").joinpath("crossover.json").read_text())["rows"]
