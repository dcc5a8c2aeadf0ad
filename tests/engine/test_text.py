"""Text of a row as it grows: stop strings across token borders, end tokens, characters in pieces."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from skg_jax.engine.text import TextRow
from skg_jax.tokenizer import Tokenizer

PIECES = ["a", "b", "ab", "ba", "aba", "bb", "c", "Ã", "©"]  # byte-level names: the last two are the bytes of é
END = len(PIECES)


def _tokenizer() -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate([*PIECES, "<end>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, bos=None, eos_ids=[END])


TOKENIZER = _tokenizer()


def _feed(ids, stop=()) -> tuple[TextRow, list[str], bool]:
    row = TextRow(TOKENIZER, stop, TOKENIZER.eos_ids)
    shown = []
    for token in ids:
        text, ended = row.push(token)
        shown.append(text)
        if ended:
            return row, shown, True
    return row, shown, False


def _expected(ids, stop) -> tuple[str, int | None]:
    """Text, and the token that ends it: the first with which the whole text so far holds a stop string."""
    text = ""
    for i, token in enumerate(ids):
        if token == END:
            return text, i
        text += PIECES[token]
        found = [text.find(s) for s in stop if s in text]
        if found:
            return text[: min(found)], i
    return text, None


@given(
    st.lists(st.sampled_from([*range(7), *range(7), END]), max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=3).map(tuple),
)
def test_text_is_cut_at_the_first_stop_string(ids, stop):
    row, shown, ended = _feed(ids, stop)
    text, end = _expected(ids, stop)
    assert ended == (end is not None)
    assert len(row.tokens) == (len(ids) if end is None else end + 1)
    if not ended:
        shown.append(row.flush())
    assert "".join(shown) == row.text == text


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    row = TextRow(TOKENIZER, ("abac",), ())
    shown = [row.push(PIECES.index(piece))[0] for piece in ("c", "a", "ba", "bb", "c")]
    assert shown == ["c", "", "", "ababb"[:5], "c"]


def test_the_bytes_of_a_character_come_out_together():
    row, shown, _ = _feed([PIECES.index(piece) for piece in ("a", "Ã", "©", "b")])
    assert shown == ["a", "", "é", "b"]
    assert row.flush() == ""


def test_an_unfinished_character_is_marked_at_the_end():
    row, shown, ended = _feed([PIECES.index("a"), PIECES.index("Ã")])
    assert (shown, ended, row.flush()) == (["a", ""], False, "�")
    assert _feed([PIECES.index("Ã"), END])[1:] == (["", "�"], True)


def test_without_end_tokens_the_text_goes_on():
    row = TextRow(TOKENIZER, (), ())
    assert [row.push(token) for token in (0, END, 1)] == [("a", False), ("", False), ("b", False)]
