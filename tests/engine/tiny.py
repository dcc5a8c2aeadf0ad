"""One small random model with its own tokenizer, shared by all tests of engine and command lines: compiling is dear."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import skg_jax
from models import decoder, registry
from models.config import ModelConfig
from skg_jax.tokenizer import Tokenizer

CONTEXT = 512  # one bucket
CONFIG = ModelConfig(
    architecture="llama", vocab_size=331, embed_dim=36, mlp_dim=52, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_context=CONTEXT,
)  # fmt: skip
TEXT = " ".join(topics["assert"].split())[:600]  # about 300 tokens
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"


def backend() -> tokenizers.Tokenizer:
    """Byte-level BPE of 320 tokens, trained on the documentation of Python; the model's other ids stand for nothing."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([topics["assert"], topics["binary"]], trainer)
    return made


@functools.cache
def folder() -> Path:
    """An orbax directory, complete with its tokenizer, that is deleted with the process."""
    made = backend()
    tokenizer = Tokenizer(made, bos=None, eos_ids=[], eos_token="<|im_end|>", chat_template=TEMPLATE)
    params = _lively(decoder.init(CONFIG, jax.random.key(3)))
    path = Path(_directory().name) / "tiny"
    registry.save(path, registry.Model(CONFIG, params, "tiny", path, "orbax", None), tokenizer)
    return path


def _lively(params: decoder.Params) -> decoder.Params:
    """Attention that is far from flat, and tokens that vary; both are flat at random."""
    gains = {"q": 6.0, "k": 6.0, "embed": 50.0, "head": 50.0}
    scale = lambda path, x: x * max((gain for name, gain in gains.items() if name in path.split(".")), default=1.0)
    named = lambda path, x: scale(jax.tree_util.keystr(path, simple=True, separator="."), x)
    return jax.tree.map_with_path(named, params)


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="skg-tiny-")


@functools.cache
def engine() -> skg_jax.Engine:
    """The one engine; what it compiled is kept for the next test."""
    return skg_jax.load(folder())
