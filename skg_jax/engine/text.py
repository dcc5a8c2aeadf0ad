"""The text of one row as it grows: incremental detokenising, end tokens, stop strings held back.

What was shown is never taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skg_jax.tokenizer import Tokenizer


class TextRow:
    """`push` tokens; what it returns may be shown, and is never taken back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], ends: Collection[int]):
        self.tokens: list[int] = []
        self.text = ""  # shown so far
        self._held = ""  # could still be the beginning of a stop string
        self._stream = tokenizer.stream()
        self._ends = ends
        self._stop = stop

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token. Returns the text to show, and whether the row has ended."""
        self.tokens.append(token)
        if token in self._ends:
            return self.flush(), True
        self._held += self._stream.step(token)
        hits = [self._held.find(stop) for stop in self._stop]
        if any(at >= 0 for at in hits):
            self._held = self._held[: min(at for at in hits if at >= 0)]
            return self._show(len(self._held)), True
        return self._show(len(self._held) - self._overlap()), False

    def flush(self) -> str:
        """Show what was held back, and the rest of an unfinished character, at the end of the row."""
        self._held += self._stream.finish()
        return self._show(len(self._held))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self.text += shown
        return shown

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        sizes = (
            n
            for stop in self._stop
            for n in range(min(len(stop), len(self._held)), 0, -1)
            if self._held.endswith(stop[:n])
        )
        return max(sizes, default=0)
