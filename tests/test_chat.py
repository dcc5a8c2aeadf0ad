"""Chat templates: the text that transformers renders, one BOS, and a sandbox that holds."""

import datetime

import pytest
import tokenizers
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import models as token_models

from models import registry
from models.errors import ModelError
from skg_jax import chat, tokenizer
from tests import golden
from tests.golden import prompts

HELLO = [{"role": "user", "content": "hi"}]


def _with(template: str | None, bos: int | None = None) -> tokenizer.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(token_models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer.Tokenizer(backend, bos=bos, eos_ids=[1], bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct"])
def test_conversations_are_rendered_as_by_transformers(name):
    try:
        loaded = tokenizer.load(registry.find(name))
    except ModelError as error:
        if name == registry.DEFAULT:  # a dependency: it must be there
            raise
        pytest.skip(str(error))
    cases = golden.renderings(name)
    assert len(cases) == 2 * len(prompts.CHATS)
    for case in cases:
        messages = prompts.CHATS[case["conversation"]]
        assert chat.render(loaded, messages, add_generation_prompt=case["add_generation_prompt"]) == case["text"]


def test_ids_of_a_rendered_conversation_are_those_of_the_golden_prompt():
    loaded = tokenizer.load(registry.find(registry.DEFAULT))
    cases = {case.name: case.prompt for case in golden.continuations(registry.DEFAULT)}
    for name in ("hello", "system", "turns", "code"):
        assert chat.encode(loaded, prompts.CHATS[name]) == cases[f"chat_{name}"]


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
@pytest.mark.parametrize("bos", [256, None])
def test_one_bos_where_the_model_wants_one(template, bos):
    """Rendered by the template, added by the tokenizer, or both: it is there once."""
    ids = chat.encode(_with(template, bos), HELLO)
    assert ids.count(256) == (bos is not None or "bos_token" in template)
    assert len(ids) == 2 + ids.count(256)


def test_json_is_neither_escaped_nor_sorted():
    loaded = _with("{{ tools | tojson }}|{{ tools[0] | tojson(indent=1) }}")
    found = chat.render(loaded, HELLO, tools=[{"b": "<é&'>", "a": 1}])
    assert found == '[{"b": "<é&\'>", "a": 1}]|{\n "b": "<é&\'>",\n "a": 1\n}'


def test_blocks_are_trimmed_and_loops_can_be_left():
    template = (
        "{% for m in messages %}\n  {% if loop.index > 2 %}\n{% break %}\n{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    )
    messages = [{"role": "user", "content": str(i)} for i in range(5)]
    assert chat.render(_with(template), messages) == "0\n1\n"


def test_generation_marks_only_enclose():
    template = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert chat.render(_with(template), HELLO) == "[hi]"


def test_arguments_reach_the_template():
    template = "{{ enable_thinking }} {{ documents[0].title }} {{ add_generation_prompt }} {{ eos_token }}"
    found = chat.render(_with(template), HELLO, documents=[{"title": "T"}], enable_thinking=False)
    assert found == "False T True </s>"


def test_the_date_is_today():
    assert chat.render(_with("{{ strftime_now('%Y') }}"), HELLO) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template):
    messages = [dict(HELLO[0])]
    with pytest.raises(chat.ChatError):
        chat.render(_with(template), messages)
    assert messages == HELLO


def test_a_template_sees_no_internals():
    assert chat.render(_with("[{{ raise_exception.__globals__ }}]"), HELLO) == "[]"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].absent.deeper }}", "has no attribute 'absent'"),
        ("{{ 'a' + messages[0] }}", "can only concatenate str"),
        ("{% if %}", "Expected an expression"),
        (None, "--raw"),
    ],
)
def test_what_the_template_cannot_express_is_said(template, sentence):
    with pytest.raises(chat.ChatError, match=sentence):
        chat.render(_with(template), HELLO)
