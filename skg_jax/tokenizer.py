"""Text to token ids and back, for the three model formats, through the `tokenizers` library.

Where a model wants a beginning-of-sequence token there is exactly one, also when the text already starts with it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import models as bpe_models

from models.errors import ModelError

# generation_config.json: what users expect as the model's own defaults
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids, the template and the defaults that a model needs at run time.

    `bos` is the id that `encode(..., add_special=True)` puts in front, None for models that want none. `eos_ids` end a
    generation. `sampling` holds the defaults of generation_config.json, empty when there is none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: int | None,
        eos_ids: Iterable[int],
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ):
        self.backend = backend
        self.bos = bos
        self.eos_ids = frozenset(eos_ids)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        self.sampling = dict(sampling or {})

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model's own `vocab_size` may be larger by padding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids; special tokens written out in `text` become their ids."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if add_special and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> "Stream":
        """A decoder for ids that arrive one by one."""
        return Stream(self.backend, skip_special)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and its companions, from which `load` restores the same tokenizer."""
        folder = Path(folder)
        self.backend.save(str(folder / "tokenizer.json"))
        settings = {
            "add_bos_token": self.bos is not None,
            "bos_token": self.bos_token or None,
            "eos_token": self.eos_token or None,
            "chat_template": self.chat_template,
        }
        generation = {"eos_token_id": sorted(self.eos_ids), **self.sampling}
        for name, values in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
            (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Stream:
    """Incremental decoding: a character whose bytes span several tokens comes out whole, with the last of them."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool):
        self._backend = backend
        self._skip_special = skip_special
        self._decoder = decoders.DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._sent = 0

    def step(self, token: int) -> str:
        """The text that `token` completes, possibly empty."""
        self._ids.append(token)
        text = self._decoder.step(self._backend, token) or ""
        self._sent += len(text)
        return text

    def finish(self) -> str:
        """The rest after the last token: U+FFFD for a character that was never completed."""
        return self._backend.decode(self._ids, skip_special_tokens=self._skip_special)[self._sent :]


def load(model_path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file, a Hugging Face folder or an orbax directory. Raises `ModelError`."""
    path = Path(model_path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_gguf(path)
    raise ModelError(f"There is no tokenizer at {path}; give a GGUF file or a folder with a tokenizer.json.")


# -- folders ----------------------------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json; pass --tokenizer DIR with a folder that has one.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be read ({error}); download it again.") from error
    backend.no_truncation()
    backend.no_padding()
    settings, config, generation = (
        _json(folder / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config")
    )
    bos_token, eos_token = (_content(settings.get(name)) for name in ("bos_token", "eos_token"))
    eos_ids = {*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))}
    if eos_token:
        eos_ids.add(_id(backend, eos_token, "eos_token"))
    return Tokenizer(
        backend,
        bos=_bos(backend, settings, bos_token),
        eos_ids=eos_ids,
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=_template(folder, settings),
        sampling={name: generation[name] for name in SAMPLING if generation.get(name) is not None},
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again.") from error


def _content(token: Any) -> str:
    """A token of tokenizer_config.json: a string, an object with `content`, or null."""
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _ids(value: Any) -> list[int]:
    """`eos_token_id` is a number, a list, or absent."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _id(backend: tokenizers.Tokenizer, token: str, role: str) -> int:
    found = backend.token_to_id(token)
    if found is None:
        raise ModelError(f"The {role} {token!r} is not in the vocabulary; the tokenizer's files do not match.")
    return found


def _bos(backend: tokenizers.Tokenizer, settings: dict[str, Any], bos_token: str) -> int | None:
    """The id that the tokenizer puts in front: as its post-processor does, or as `add_bos_token` says."""
    added = backend.encode("", add_special_tokens=True).ids
    if len(added) > 1:
        raise ModelError(f"The tokenizer adds the special tokens {added}, but only one in front is implemented.")
    if added:
        return added[0]
    return _id(backend, bos_token, "bos_token") if settings.get("add_bos_token") and bos_token else None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja, or `chat_template` of tokenizer_config.json: text, or named texts with one `default`."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


# -- GGUF -------------------------------------------------------------------------------------------------------------

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
_PRE_TOKENIZERS = {
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


def _from_gguf(path: Path) -> Tokenizer:
    # Imported here: a folder's tokenizer needs no GGUF reader.
    from models.loading.gguf_reader import open_reader

    fields = open_reader(path).fields

    def value(name: str, default: Any = None) -> Any:
        return fields[f"tokenizer.{name}"].contents() if f"tokenizer.{name}" in fields else default

    tokens = value("ggml.tokens", [])
    backend = _gguf_backend(path, value, tokens)
    pre = value("ggml.pre")
    bos, eos = value("ggml.bos_token_id"), value("ggml.eos_token_id")
    # llama.cpp's own default: Llama 3 starts with BOS even when its file does not say so.
    add_bos = value("ggml.add_bos_token", pre == "llama-bpe") and bos is not None
    return Tokenizer(
        backend,
        bos=bos if add_bos else None,
        eos_ids=_gguf_eos(backend, eos, value("ggml.eot_token_id"), value("ggml.eom_token_id")),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        chat_template=value("chat_template"),
    )


def _gguf_backend(path: Path, value, tokens: list[str]) -> tokenizers.Tokenizer:
    kind, pre = value("ggml.model"), value("ggml.pre", "default")
    try:
        if (embedded := value("huggingface.json")) is not None:
            return tokenizers.Tokenizer.from_str(embedded)
        if kind == "gpt2" and pre in _PRE_TOKENIZERS:
            types = value("ggml.token_type", [1] * len(tokens))
            return _byte_level_bpe(pre, tokens, types, value("ggml.merges", []))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"The tokenizer in {path} is damaged ({error}); download the file again.") from error
    raise ModelError(
        f"{path} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}, which is not implemented; "
        "pass --tokenizer DIR with a folder that has the model's tokenizer.json."
    )


def _byte_level_bpe(pre: str, tokens: list[str], types: list[int], merges: list[str]) -> tokenizers.Tokenizer:
    pre_tokenizer, normalizer, ignore_merges = _PRE_TOKENIZERS[pre]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
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


def _gguf_eos(backend: tokenizers.Tokenizer, *ids: int | None) -> set[int]:
    """The ids that the file names, and the end of a document, which Qwen's generation_config.json lists besides."""
    return {i for i in (*ids, backend.token_to_id("<|endoftext|>")) if i is not None}
