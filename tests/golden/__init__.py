"""Values computed by transformers (see make_golden.py), for every test that needs them.

`SKG_GOLDEN` names another folder to read, which is how compare_live.py puts freshly computed values in their place.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(os.environ.get("SKG_GOLDEN") or Path(__file__).parent)


class Continuation(NamedTuple):
    """A prompt and what the model says to it.

    `top_ids`, `top_logits` `[64]` are the largest logits after the prompt, descending; `logsumexp` and `norm` are taken
    over the whole vocabulary. `greedy` are 32 argmax tokens, no stop. `margin` is the smallest lead of an argmax.
    """

    name: str
    prompt: list[int]
    greedy: list[int]
    margin: float
    top_ids: np.ndarray
    top_logits: np.ndarray
    logsumexp: float
    norm: float


@functools.cache
def _json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def continuations(model: str) -> list[Continuation]:
    """The prompts of a built-in model, in the order of prompts.py."""
    arrays = _arrays(model)
    return [
        Continuation(
            **entry,
            top_ids=arrays["top_ids"][i],
            top_logits=arrays["top_logits"][i],
            logsumexp=float(arrays["logsumexp"][i]),
            norm=float(arrays["norm"][i]),
        )
        for i, entry in enumerate(_json(model)["prompts"])
    ]


def tiny_logits(name: str) -> np.ndarray:
    """float32 `[B, T, V]` of a model of tiny.py, at the positions `tiny.POSITIONS`."""
    return _arrays("tiny")[name]


def tokens(tokenizer: str) -> list[tuple[str, list[int]]]:
    """(text, ids) for the texts of prompts.py, by "smollm" or "qwen2", or "synthetic KIND" for its vocabulary."""
    return [(entry["text"], entry["ids"]) for entry in _json("tokens")[tokenizer]]


def renderings(model: str) -> list[dict[str, Any]]:
    """Entries with `conversation` (a name of prompts.py), `add_generation_prompt`, and the rendered `text`."""
    return _json("chats")[model]
