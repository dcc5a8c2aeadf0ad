"""Byte-pair encoding in its simplest form (Sennrich et al. 2016; Radford et al. 2019): slow, and easy to believe.

An oracle for the tokenizers that are built from GGUF files. It needs the `regex` package.
"""

import unicodedata

import regex  # pyright: ignore[reportMissingModuleSource]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The patterns that split a text, one after the other; whether it is normalised; whether known words skip the merges.
KINDS = {
    "smollm": ((r"\p{N}", _GPT2), False, False),
    "qwen2": ((_GPT4 % "",), True, False),
    "llama-bpe": ((_GPT4 % "{1,3}",), False, True),
}


def _printable() -> dict[int, str]:
    """GPT-2's names of the 256 bytes: themselves where printable, else the next code points from 256 on."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in keep]
    return {byte: chr(byte) for byte in keep} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


BYTES = _printable()


class Oracle:
    """`special` are the tokens that are cut out of a text before anything else."""

    def __init__(self, kind: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], special: list[str]):
        self.patterns, self.normalise, self.whole_words = KINDS[kind]
        self.vocabulary = vocabulary
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        names = "|".join(regex.escape(name) for name in sorted(special, key=len, reverse=True))
        self.special = regex.compile(f"({names})")

    def encode(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(self.special.split(text)):
            if i % 2:
                ids.append(self.vocabulary[part])
                continue
            part = unicodedata.normalize("NFC", part) if self.normalise else part
            ids += [token for word in self._words(part) for token in self._merge(word)]
        return ids

    def _words(self, text: str) -> list[str]:
        words = [text]
        for pattern in self.patterns:
            # Whatever lies between two matches is a word too.
            words = [piece for word in words for piece in regex.split(f"({pattern})", word) if piece]
        return words

    def _merge(self, word: str) -> list[int]:
        parts = [BYTES[byte] for byte in word.encode()]
        if self.whole_words and "".join(parts) in self.vocabulary:
            return [self.vocabulary["".join(parts)]]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))  # noqa: B905
            best = min(pairs, key=lambda pair: self.ranks.get(pair, float("inf")))
            if best not in self.ranks:
                break
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(best)]
        return [self.vocabulary[part] for part in parts]
