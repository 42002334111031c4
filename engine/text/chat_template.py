"""Renders chat messages to one prompt text with a model's chat template, as transformers does but without importing it.

The Jinja environment is that of transformers' chat_template_utils: the immutable sandbox with loop controls, a `tojson`
that does not escape HTML, `raise_exception`, `strftime_now` and the `{% generation %}` block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.engine.errors import InvalidRequest, ModelError

Message = dict[str, Any]

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Template variables that chat_template_kwargs may not set."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the final message before rendering, to find where it ends in the rendered text; as in transformers."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning."""


class ChatRenderer:
    """Compiles a model's chat templates once and renders conversations with them."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError for a template that is not valid Jinja."""
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in templates.items()}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included.

        variables: the request's chat_template_kwargs. With continue_final_message the text ends where the last
        message's content ends. Raises InvalidRequest when there is no template or the template refuses the messages.
        """
        template = self._template(tools)
        variables = variables or {}
        for name in RESERVED:
            if name in variables:
                raise InvalidRequest(
                    f"chat_template_kwargs must not set {name}: it has a parameter of its own",
                    param="chat_template_kwargs",
                )
        turns = [normalize(message) for message in messages]
        final = turns[-1]["content"] if turns else ""
        if continue_final_message:
            turns[-1]["content"] = final + CONTINUE_MARK
        try:
            text = template.render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": turns,
                    "tools": tools or None,
                    "documents": documents or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template can raise any exception on messages that it was not written for
            raise InvalidRequest(
                f"The chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return cut_at_mark(text, final) if continue_final_message else text

    def with_template(self, source: str) -> ChatRenderer:
        """A renderer with a caller's template instead of the model's. Raises InvalidRequest for invalid Jinja."""
        try:
            return ChatRenderer({"default": source}, self._special_tokens)
        except ModelError as error:
            raise InvalidRequest(error.message, param="chat_template") from error

    def _template(self, tools: Sequence[dict[str, Any]] | None) -> jinja2.Template:
        """The template to use: "tool_use" for a request with tools, if the model has one, else "default"."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or serve a model whose files hold one",
                param="messages",
            )
        return template


def cut_at_mark(text: str, final: str) -> str:
    """The rendered text up to the end of its final message `final`, cut as by transformers' apply_chat_template.

    Raises InvalidRequest when the text does not contain the message unchanged.
    """
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the final message as it is",
            param="continue_final_message",
        )
    # If the template removed the space at the end of the mark, it trims messages: then the message's own trailing
    # whitespace must go too, as it would have without the mark.
    return text[:place] if text.startswith(CONTINUE_MARK, place) else text[:place].rstrip()


def normalize(message: Message) -> Message:
    """A message as templates expect it: content as a string, tool arguments as objects, reasoning under all names."""
    content = message.get("content")
    result = {**message, "content": content if isinstance(content, str) else _join_parts(content)}
    if result.get("tool_calls"):
        result["tool_calls"] = [_parse_arguments(call) for call in result["tool_calls"]]
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return {name: value for name, value in result.items() if value is not None}


def _join_parts(parts: Sequence[dict[str, Any]] | None) -> str:
    """Join text parts to one string. Null becomes "", as templates concatenate content without a check."""
    return "\n".join(part["text"] for part in parts or ())


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Replace the arguments, which OpenAI's API has as JSON in a string, with the object that templates expect."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training. When a prompt is rendered, it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _compile(environment: ImmutableSandboxedEnvironment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template {name!r} is not valid, line {error.lineno}: {error.message}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
