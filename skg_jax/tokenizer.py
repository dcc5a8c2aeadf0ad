"""Text to token ids and back, for the three model formats, through the `tokenizers` library.

Where a model wants a beginning-of-sequence token there is exactly one, also when the text already starts with it.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

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


def _from_gguf(path: Path) -> Tokenizer:
    # Imported here: a folder's tokenizer needs no GGUF reader.
    from models.loading.gguf_reader import open_reader
    from models.loading.gguf_tokenizer import build, value

    reader = open_reader(path)
    backend = build(reader, str(path))
    bos, eos, eot, eom = (value(reader, f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
    # llama.cpp's own default: Llama 3 starts with BOS even when its file does not say so.
    add_bos = value(reader, "ggml.add_bos_token", value(reader, "ggml.pre") == "llama-bpe")
    # Qwen's generation_config.json lists the end of a document besides; GGUF files do not.
    document = backend.token_to_id("<|endoftext|>")
    return Tokenizer(
        backend,
        bos=bos if add_bos else None,
        eos_ids={i for i in (eos, eot, eom, document) if i is not None},
        bos_token=_token(backend, bos),
        eos_token=_token(backend, eos),
        chat_template=value(reader, "chat_template"),
    )


def _token(backend: tokenizers.Tokenizer, i: int | None) -> str:
    return "" if i is None else backend.id_to_token(i) or ""
