"""GGUF metadata -> a `tokenizers.Tokenizer`, for the byte-level pre-tokenizers that are known here."""

from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import models as bpe_models

from models.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types of the format

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Words by `pattern`, then bytes as printable characters."""
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    """Every digit alone, then GPT-2's words."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


# `tokenizer.ggml.pre` -> pre-tokenizer, normalizer, whether whole words of the vocabulary skip the merges
PRE_TOKENIZERS = {
    "smollm": (_digits_then_gpt2(), None, False),
    "qwen2": (
        _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST),
        normalizers.NFC(),
        False,
    ),
    "llama-bpe": (
        _split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST),
        None,
        True,
    ),
}


def value(reader: gguf.GGUFReader, name: str, default: Any = None) -> Any:
    """The contents of `tokenizer.NAME`."""
    field = reader.fields.get(f"tokenizer.{name}")
    return default if field is None else field.contents()


def build(reader: gguf.GGUFReader, path: str) -> tokenizers.Tokenizer:
    """The tokenizer of an open file; raises `ModelError` when it is damaged or of a kind that is not known."""
    kind, pre = value(reader, "ggml.model"), value(reader, "ggml.pre", "default")
    try:
        if (embedded := value(reader, "huggingface.json")) is not None:
            return tokenizers.Tokenizer.from_str(embedded)
        if kind == "gpt2" and pre in PRE_TOKENIZERS:
            tokens = value(reader, "ggml.tokens", [])
            types = value(reader, "ggml.token_type", [1] * len(tokens))
            return _byte_level_bpe(pre, tokens, types, value(reader, "ggml.merges", []))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"The tokenizer in {path} is damaged ({error}); download the file again.") from error
    raise ModelError(
        f"{path} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}, which is not implemented; "
        "pass --tokenizer DIR with a folder that has the model's tokenizer.json."
    )


def _byte_level_bpe(pre: str, tokens: list[str], types: list[int], merges: list[str]) -> tokenizers.Tokenizer:
    pre_tokenizer, normalizer, ignore_merges = PRE_TOKENIZERS[pre]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    # A byte that the vocabulary lacks is dropped, as transformers does; SmolLM2 lacks a few that no text holds.
    backend = tokenizers.Tokenizer(bpe_models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=kind == _CONTROL)
            backend.add_special_tokens([added]) if added.special else backend.add_tokens([added])
    return backend
