"""Renders chat messages to one prompt text with a model's chat template, as transformers does but without importing it.

The Jinja environment is that of transformers' chat_template_utils, with bounds: the immutable sandbox with loop
controls, a `tojson` that does not escape HTML, `raise_exception`, `strftime_now` and the `{% generation %}` block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from quire.engine.errors import InvalidRequest, ModelError
from quire.engine.text.described_tools import (
    EXAMPLE,
    described,
    with_calls_as_text,
    with_descriptions,
    with_results_as_text,
)
from quire.engine.text.parts import REASONING_FIELDS, RESERVED, content_as_thought, for_template, in_parts
from quire.engine.text.roles import check_roles, named_in
from quire.engine.text.template_bounds import BoundedEnvironment, TooManySteps

Message = dict[str, Any]

_ROLES = ("bos_token", "eos_token")
"""Variables that templates add to texts, though some tokenizers have no such token."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the final message before rendering, to find where it ends in the rendered text; as in transformers."""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a template shows of tools and systems."""

    tools: bool
    """The tools that a model may call."""
    calls: bool
    """Calls that an assistant made."""
    results: bool
    """Results of calls."""
    text_arguments: bool
    """It wants the arguments of calls as JSON in a string."""
    system: bool
    """A system message."""
    late_system: bool
    """A system message behind a user's."""
    undescribed: bool
    """Tools that have no description; it fails on them where it shows only others."""
    thoughts_beside_content: bool
    """Thinking and content of an assistant that makes calls; it may refuse both in one message."""


class ChatRenderer:
    """Compiles a model's chat templates once and renders conversations with them."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        any_role: bool = False,
        variables: Mapping[str, Any] | None = None,
        content: Literal["auto", "string", "openai"] = "auto",
    ) -> None:
        """`any_role`: messages may have roles that nobody knows. `variables`: of the template, for calls of `render`
        that do not say them. `content`: how it gets texts, as --chat-template-content-format says it. Raises ModelError
        for a template that is not valid Jinja, or that loops for ever."""
        self._variables, self._content = dict(variables or {}), content
        self._environment = _environment()
        self._any_role = any_role
        compiled = {name: _compile(self._environment, name, source) for name, source in templates.items()}
        self._templates = {name: template for name, (template, _) in compiled.items()}
        self._roles = frozenset(role for _, roles in compiled.values() for role in roles)
        self._special_tokens = {**dict.fromkeys(_ROLES, ""), **special_tokens}
        self._call = EXAMPLE
        self._describes = False
        for name, template in self._templates.items():
            self._try(name, template)

    @property
    def has_template(self) -> bool:
        """Whether there is one for conversations without tools."""
        return "default" in self._templates

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
        message's content ends. Raises InvalidRequest for a role that nobody knows, and when there is no template or the
        template refuses the messages.
        """
        variables = {**self._variables, **(variables or {})}
        for name in sorted(RESERVED):
            if name in variables:
                raise InvalidRequest(
                    f"chat_template_kwargs must not set {name}: it has a parameter of its own",
                    param="chat_template_kwargs",
                )
        if not self._any_role:
            check_roles(messages, self._roles)
        turns, tools = self._with_tools(messages, tools)
        final = turns[-1]["content"] if turns else ""
        if continue_final_message:
            turns[-1]["content"] = final + CONTINUE_MARK
        text = self._rendered(
            turns, tools, {**variables, "documents": documents or None, "add_generation_prompt": add_generation_prompt}
        )
        return cut_at_mark(text, final) if continue_final_message else text

    def with_template(self, source: str) -> ChatRenderer:
        """A renderer with a caller's template instead of the model's. Raises InvalidRequest for invalid Jinja."""
        try:
            renderer = ChatRenderer(
                {"default": source},
                self._special_tokens,
                any_role=self._any_role,
                variables=self._variables,
                content=self._content,
            )
        except ModelError as error:
            raise InvalidRequest(error.message, param="chat_template") from error
        renderer._call = self._call
        return renderer

    def describing_tools(self, call: str, *, always: bool) -> ChatRenderer:
        """A renderer that describes tools in the system message where the template does not show them, or `always`.

        `call`: how a call is to be written.
        """
        renderer = copy(self)
        renderer._call, renderer._describes = call, always
        return renderer

    @cached_property
    def shows(self) -> TemplateAbilities:
        """What the template shows, found out by rendering a few messages."""
        user, tool = {"role": "user", "content": "u"}, _probe_tool()
        arguments = {"qkeyq": "qvalueq"}

        def rendered(
            messages: list[Message], tools: Sequence[dict[str, Any]] | None = None, *, text_arguments: bool = False
        ) -> str:
            turns = [normalize(message, text_arguments=text_arguments) for message in messages]
            try:
                return self._rendered(turns, tools, {})
            except InvalidRequest:
                return ""

        def turn(arguments: Any) -> list[Message]:
            function = {"name": "qcalledq", "arguments": arguments}
            call = {"id": "qidqidqid", "type": "function", "function": function}
            return [user, {"role": "assistant", "content": "", "tool_calls": [call]}]

        shown = "tool_use" in self._templates or "qnameq" in rendered([user], [tool])
        tools, answer = [tool] if shown else None, turn(arguments)
        texts = [rendered(answer, tools), rendered(answer[1:], tools)]
        bare = {**tool, "function": {key: tool["function"][key] for key in ("name", "parameters")}}
        both = [user, normalize({**answer[1], "content": "qsaidq", "reasoning": "qthoughtq"})]
        said, system = {"role": "assistant", "content": "a"}, {"role": "system", "content": "qsystemq"}
        result = {"role": "tool", "tool_call_id": "qidqidqid", "name": "qcalledq", "content": "qresultq"}
        as_object = any(mark in text for text in texts for mark in ("qcalledq", "qidqidqid", "qvalueq"))
        as_text = not as_object and "qcalledq" in rendered(answer, tools, text_arguments=True)
        return TemplateAbilities(
            tools=shown,
            calls=as_object or as_text,
            results=any("qresultq" in rendered([*turns, result], tools) for turns in (answer, [user, said])),
            text_arguments=as_text,
            system="qsystemq" in rendered([system, user]),
            late_system="qsystemq" in rendered([user, system]),
            undescribed="qnameq" not in rendered([user], [tool]) or "qnameq" in rendered([user], [bare]),
            thoughts_beside_content=rendered(both, tools) != "" or rendered(answer, tools) == "",
        )

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[Message], Sequence[dict[str, Any]] | None]:
        """The messages as the template expects them, and the tools that it is to show."""
        if not tools and not any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            return [normalize(message) for message in messages], None
        turns = [normalize(message, text_arguments=self.shows.text_arguments) for message in messages]
        if not self.shows.calls:
            turns = with_calls_as_text(turns, self._call)
        if not self.shows.results or (self._describes and not self.shows.calls):
            turns = with_results_as_text(turns)
        if not self.shows.thoughts_beside_content:
            turns = [content_as_thought(turn) for turn in turns]
        if tools and not self.shows.undescribed:
            tools = with_descriptions(tools)
        if tools and (self._describes or not self.shows.tools):
            turns = described(turns, tools, self._call, system=self.shows.system)
            tools = None
        return turns, tools

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows text in parts alone, as some do of models that see: of a string it shows nothing,
        or it fails."""
        if self._content != "auto":
            return self._content == "openai"
        turn = {"role": "user", "content": "qtextq"}

        def shows(turn: Message) -> bool:
            try:
                return "qtextq" in self._written([turn], None, {})
            except InvalidRequest:
                return False

        return not shows(turn) and shows(in_parts(turn))

    def _rendered(
        self, turns: list[Message], tools: Sequence[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        return self._written([in_parts(turn) for turn in turns] if self._wants_parts else turns, tools, variables)

    def _written(
        self, turns: list[Message], tools: Sequence[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        template = self._template(tools)
        try:
            shown = {"messages": ReadOnlyList(turns), "tools": tools or None}
            return self._environment.render(template, {**self._special_tokens, **variables, **shown})
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template can raise any exception on messages that it was not written for
            raise InvalidRequest(
                f"The chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _try(self, name: str, template: jinja2.Template) -> None:
        """Raise ModelError for a template that exceeds its bounds with a short conversation; it may refuse that."""
        turns = [{"role": "user", "content": "Hi"}]
        others = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._environment.render(template, {**self._special_tokens, **others})
        except TooManySteps as error:
            raise ModelError(f"model: the chat template {name!r} cannot be rendered: {error}") from None
        except Exception:  # what it refuses now, it may take from a request
            return

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


def normalize(message: Message, *, text_arguments: bool = False) -> Message:
    """A message as templates expect it: content as a string, or as parts where some are images, tool arguments as
    objects, or as JSON in a string, and reasoning under all names."""
    content = message.get("content")
    result = {**message, "content": content if isinstance(content, str) else for_template(content)}
    if result.get("tool_calls"):
        result["tool_calls"] = [_with_arguments(call, as_text=text_arguments) for call in result["tool_calls"]]
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is not None:
        result = {**dict.fromkeys(REASONING_FIELDS, reasoning), **result, "reasoning_content": reasoning}
    return {name: value for name, value in result.items() if value is not None}


def _probe_tool() -> dict[str, Any]:
    parameter = {"type": "string", "description": "d"}
    parameters = {"type": "object", "properties": {"qkeyq": parameter}, "required": ["qkeyq"]}
    return {"type": "function", "function": {"name": "qnameq", "description": "d", "parameters": parameters}}


def _with_arguments(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Replace the arguments, which OpenAI's API has as JSON in a string, with the object that templates expect.

    Where the template expects text, an object is written as JSON. Text that is no JSON stays as it is.
    """
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str) is as_text:
        return call
    arguments = function.get("arguments")
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
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


class ReadOnlyList(list[Any]):
    """A list that a template may read and not change, as in transformers."""


class Sandbox(BoundedEnvironment):
    """transformers' environment, but a template may change lists of its own: Kimi K2's keeps calls' ids in one."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        own = type(obj) is list and attr in ("append", "extend", "insert", "pop")
        return own or super().is_safe_attribute(obj, attr, value)


def _compile(environment: Sandbox, name: str, source: str) -> tuple[jinja2.Template, Set[str]]:
    """The template, and the roles that it names."""
    try:
        tree = environment.parse(source)
        roles = named_in(tree)  # before the compiler folds lists of literals into one
        return environment.from_string(tree), roles
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"model: the chat template {name!r} is not valid, line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, MemoryError, SyntaxError):  # Python's compiler raises all three for what is nested deeply
        raise ModelError(f"model: the chat template {name!r} is nested too deeply") from None


def _environment() -> Sandbox:
    extensions = [GenerationBlock, jinja2.ext.loopcontrols]
    environment = Sandbox({"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
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
