"""Prompts of any length from English text that every Python carries: its language reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pydoc_data.topics import topics


def prompts(encode: Callable[[str], list[int]], tokens: int, count: int, seed: int) -> list[list[int]]:
    """`count` prompts of exactly `tokens` token ids, each from a place of the text that the seed decides."""
    text = "\n".join(topics[name] for name in sorted(topics))
    places = random.Random(seed)
    return [_prompt(encode, text, places.randrange(len(text)), tokens) for _ in range(count)]


def _prompt(encode: Callable[[str], list[int]], text: str, start: int, tokens: int) -> list[int]:
    """Longer pieces until one is long enough; past its end the text begins anew."""
    size, ids = 4 * tokens, []
    while len(ids) < tokens:
        size *= 2
        rounds = -(-size // len(text)) + 1
        ids = encode((text * rounds)[start : start + size])
    return ids[:tokens]
