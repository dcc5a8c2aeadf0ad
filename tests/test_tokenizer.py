"""Token ids against an independent byte-pair encoder, streaming against whole decoding, exactly one BOS."""

import json

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import decoders as token_decoders
from tokenizers import models as token_models

from models import registry
from models.errors import ModelError
from skg_jax import tokenizer
from tests import golden
from tests.golden import prompts
from tests.models.files import add_value, finish

QWEN = "qwen2.5-coder-0.5b-instruct"


@pytest.fixture(scope="module")
def smollm():
    return tokenizer.load(registry.find(registry.DEFAULT))


def _file(path, **changes):
    """A GGUF file without weights that holds the vocabulary of prompts.py; `None` removes a key of `tokenizer.ggml`."""
    merged = [merge.replace(" ", "") for merge in prompts.MERGES]
    parts = [prompts.SPECIAL, prompts.USER_DEFINED, sorted(pre_tokenizers.ByteLevel.alphabet()), merged]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": [token for part in parts for token in part] + prompts.WHOLE_WORDS,
        "token_type": [3] * 3 + [4] * 2 + [1] * (256 + len(merged) + len(prompts.WHOLE_WORDS)),
        "merges": prompts.MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (values | changes).items():
        if value is not None:
            add_value(writer, f"tokenizer.ggml.{key}", value)
    return finish(writer, path)


def _check(loaded, kind):
    cases = golden.tokens(kind)
    assert len(cases) > 30
    for text, ids in cases:
        assert loaded.encode(text) == ids, text


def test_ids_of_smollm2(smollm):
    _check(smollm, "smollm")
    assert (smollm.vocab_size, smollm.bos, smollm.eos_ids) == (49152, None, {0, 2})
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("kind", ["smollm", "qwen2", "llama-bpe"])
def test_ids_by_the_rules_of_each_pre_tokenizer(tmp_path, kind):
    _check(tokenizer.load(_file(tmp_path / "v.gguf", pre=kind, add_bos_token=False)), f"synthetic {kind}")


@pytest.mark.parametrize("pair", [("smollm", "qwen2"), ("smollm", "llama-bpe"), ("qwen2", "llama-bpe")])
def test_the_texts_tell_the_pre_tokenizers_apart(pair):
    """Negative control: another kind could not pass the test above."""
    one, other = (golden.tokens(f"synthetic {kind}") for kind in pair)
    assert sum(a != b for a, b in zip(one, other, strict=True)) >= 5


def test_ids_of_qwen():
    try:
        path = registry.find(QWEN)
    except ModelError as error:
        pytest.skip(str(error))
    loaded = tokenizer.load(path)
    _check(loaded, "qwen2")
    assert (loaded.vocab_size, loaded.bos, loaded.eos_ids) == (151936, None, {151643, 151645})


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    return tokenizer.load(_file(tmp_path_factory.mktemp("gguf") / "v.gguf"))


@given(st.text(max_size=40))
def test_decoding_undoes_encoding(synthetic, text):
    ids = synthetic.encode(text)
    assert synthetic.decode(ids, skip_special=False) == text
    stream = synthetic.stream(skip_special=False)
    assert "".join(stream.step(i) for i in ids) + stream.finish() == text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_are_streamed_as_they_are_decoded(synthetic, ids):
    """Ids that are no UTF-8 too: a sampled model may emit them."""
    ids = [5 + i for i in ids]
    stream = synthetic.stream()
    assert "".join(stream.step(i) for i in ids) + stream.finish() == synthetic.decode(ids)


def test_a_byte_that_the_vocabulary_lacks_is_dropped(smollm):
    assert smollm.encode("a\x16b") == smollm.encode("a") + smollm.encode("b")


def test_a_character_is_streamed_whole(smollm):
    ids = smollm.encode("a🙂b")
    stream = smollm.stream()
    pieces = [stream.step(i) for i in ids]
    assert "".join(pieces) == "a🙂b"
    assert "🙂" in pieces and "" in pieces


def test_an_unfinished_character_comes_out_at_the_end(smollm):
    ids = smollm.encode("a🙂")[:-1]
    stream = smollm.stream()
    assert "".join(stream.step(i) for i in ids) == "a"
    assert set(stream.finish()) == {"\ufffd"}


def test_special_tokens_are_skipped_or_shown(smollm):
    ids = smollm.encode("hi<|im_end|>")
    assert ids[-1] == 2
    for skip, text in ((True, "hi"), (False, "hi<|im_end|>")):
        stream = smollm.stream(skip)
        assert smollm.decode(ids, skip) == "".join(map(stream.step, ids)) + stream.finish() == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"add_bos_token": True}, 1),
        ({"add_bos_token": False}, None),
        ({"add_bos_token": None}, None),
        ({"pre": "llama-bpe", "add_bos_token": None}, 1),
        ({"pre": "llama-bpe", "add_bos_token": True, "bos_token_id": None}, None),
    ],
    ids=str,
)
def test_who_starts_with_bos(tmp_path, changes, expected):
    """As llama.cpp: what the file says, and Llama 3 by default."""
    loaded = tokenizer.load(_file(tmp_path / "v.gguf", **changes))
    assert loaded.bos == expected
    for text in ("hi", "", "<|im_start|>hi"):
        assert loaded.encode(text).count(1) == (expected is not None or text.startswith("<|im_start|>"))
        assert loaded.encode(text, add_special=False).count(1) == text.startswith("<|im_start|>")


def test_eot_and_eom_end_a_generation(tmp_path):
    assert tokenizer.load(_file(tmp_path / "v.gguf", eot_token_id=7, eom_token_id=9)).eos_ids == {0, 2, 7, 9}


@pytest.mark.parametrize("changes", [{"pre": "deepseek-coder"}, {"pre": None}, {"model": "llama"}], ids=str)
def test_other_tokenizers_are_refused_by_name(tmp_path, changes):
    path = _file(tmp_path / "v.gguf", **changes)
    with pytest.raises(ModelError, match="--tokenizer DIR") as error:
        tokenizer.load(path)
    assert (changes.get("pre") or changes.get("model") or "default") in str(error.value)


@pytest.mark.parametrize("changes", [{"merges": ["H ello"]}, {"token_type": [1]}], ids=str)
def test_a_damaged_vocabulary_is_refused(tmp_path, changes):
    with pytest.raises(ModelError, match="The tokenizer in .* is damaged"):
        tokenizer.load(_file(tmp_path / "v.gguf", **changes))


def test_an_embedded_tokenizer_json_is_preferred(smollm, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_string("tokenizer.huggingface.json", smollm.backend.to_str())
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    loaded = tokenizer.load(finish(writer, tmp_path / "v.gguf"))
    assert loaded.encode("Hello, world!") == smollm.encode("Hello, world!")


# -- folders ----------------------------------------------------------------------------------------------------------


def _folder(path, *, post_bos: bool, settings=None, **files):
    """A byte-level tokenizer of 256 bytes, `<s>` 256 and `</s>` 257, whose post-processor adds `<s>` or nothing."""
    path.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(token_models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = token_decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    if post_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(5)
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}} | (settings or {})
    for name, values in (files | {"tokenizer_config": settings}).items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("post_bos", [True, False])
@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_exactly_one_bos_from_a_folder(tmp_path, post_bos, add_bos_token):
    loaded = tokenizer.load(_folder(tmp_path, post_bos=post_bos, settings={"add_bos_token": add_bos_token}))
    wanted = post_bos or bool(add_bos_token)
    assert loaded.encode("hello")[:1] == ([256] if wanted else [loaded.encode("h")[0]])
    assert loaded.encode("hello").count(256) == wanted
    assert loaded.encode("<s>hello").count(256) == 1
    assert loaded.encode("hello", add_special=False).count(256) == 0
    assert len(loaded.encode("hello", add_special=False)) == 5  # what tokenizer.json truncates is not lost
    assert len(loaded.encode("hello world", add_special=False)) == 11


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {}, {7, 257}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9, 257}),
        ({}, {"eos_token_id": None}, {257}),
    ],
)
def test_eos_ids_are_the_union_of_all_files(tmp_path, generation, config, expected):
    loaded = tokenizer.load(_folder(tmp_path, post_bos=False, generation_config=generation, config=config))
    assert loaded.eos_ids == expected


def test_sampling_defaults_come_from_generation_config(tmp_path):
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "transformers_version": "5"}
    loaded = tokenizer.load(_folder(tmp_path, post_bos=False, generation_config=values))
    assert loaded.sampling == {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert tokenizer.load(_folder(tmp_path / "b", post_bos=False)).sampling == {}


def test_where_a_template_is_found(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = _folder(tmp_path, post_bos=False, settings={"chat_template": named})
    assert tokenizer.load(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("J")
    assert tokenizer.load(path).chat_template == "J"


def test_a_saved_tokenizer_is_the_same(tmp_path, smollm):
    for original in (
        smollm,
        tokenizer.load(_folder(tmp_path / "a", post_bos=True, generation_config={"temperature": 0.5})),
        tokenizer.load(_file(tmp_path / "v.gguf", add_bos_token=True)),
    ):
        folder = tmp_path / "saved"
        folder.mkdir(exist_ok=True)
        original.save(folder)
        again = tokenizer.load(folder)
        for text in prompts.TEXTS:
            assert again.encode(text) == original.encode(text)
        for name in ("bos", "eos_ids", "bos_token", "eos_token", "chat_template", "sampling", "vocab_size"):
            assert getattr(again, name) == getattr(original, name), name


def test_files_that_do_not_fit(tmp_path):
    with pytest.raises(ModelError, match="There is no tokenizer at"):
        tokenizer.load(tmp_path / "nothing")
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        tokenizer.load(tmp_path)
    path = _folder(tmp_path, post_bos=False, settings={"eos_token": "<other>"})
    with pytest.raises(ModelError, match="eos_token '<other>' is not in the vocabulary"):
        tokenizer.load(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer.json cannot be read"):
        tokenizer.load(path)
