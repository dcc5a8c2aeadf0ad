"""Chat templates, rendered as transformers renders them, in a sandbox: a template comes from a model file."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skg_jax.tokenizer import Tokenizer

Message = Mapping[str, Any]  # {"role": ..., "content": ..., ...}


class ChatError(ValueError):
    """A conversation that the model's template cannot express; the message is one sentence that says why."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only encloses them."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The text of a conversation; `kwargs` reach the template, as in `enable_thinking=False`. Raises `ChatError`."""
    if not tokenizer.chat_template:
        raise ChatError("The model has no chat template; give the prompt as it is (--raw).")
    try:
        return (
            _environment()
            .from_string(tokenizer.chat_template)
            .render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                **kwargs,
            )
        )
    except Exception as error:  # the template is foreign code: whatever it raises, the conversation did not fit it
        raise ChatError(f"The model's chat template cannot render the conversation: {error}.") from error


def encode(tokenizer: Tokenizer, messages: Sequence[Message], **kwargs: Any) -> list[int]:
    """Token ids of `render(tokenizer, messages, **kwargs)`, with exactly one BOS where the model wants one."""
    return tokenizer.encode(render(tokenizer, messages, **kwargs), add_special=True)
