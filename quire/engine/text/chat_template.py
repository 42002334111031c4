"""Renders chat messages to one prompt text with a model's chat template, as transformers does but without importing it.

The Jinja environment is that of transformers' chat_template_utils, with bounds: the immutable sandbox with loop
controls, a `tojson` that does not escape HTML, `raise_exception`, `strftime_now` and the `{% generation %}` block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from quire.engine import clock
from quire.engine.errors import InvalidRequest, ModelError
from quire.engine.text.conversation.abilities import (
    TemplateAbilities,
    TemplateInput,
    abilities_of,
    input_of,
    probe_tool,
)
from quire.engine.text.conversation.adapter import Adapter
from quire.engine.text.conversation.rendering import Conversation, RenderedConversation
from quire.engine.text.conversation.units import RESULT_ROLES, Message, has_calls, units_of
from quire.engine.text.conversation.writing import Writer
from quire.engine.text.described_tools import EXAMPLE, described, with_descriptions
from quire.engine.text.parts import RESERVED, normalize
from quire.engine.text.roles import check_roles, named_in
from quire.engine.text.template_bounds import MAX_STEPS, BoundedEnvironment, TooManySteps

_ROLES = ("bos_token", "eos_token")
"""Variables that templates add to texts, though some tokenizers have no such token."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the final message before rendering, to find where it ends in the rendered text; as in transformers."""
PROBE_STEPS = 100_000
"""Of a rendering of a few made-up messages."""
MAX_OVERRUNS = 8
"""Such renderings that take more steps; then no more are tried with this template."""


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
        adapts: bool = True,
    ) -> None:
        """`any_role`: messages may have roles that nobody knows. `variables`: of the template, for calls of `render`
        that do not say them. `content`: how it gets texts, as --chat-template-content-format says it. `adapts`: a
        conversation that a template does not take as it is, is written as it takes it; otherwise it is refused. Raises
        ModelError for a template that is not valid Jinja, or that loops for ever."""
        self._variables, self._content = dict(variables or {}), content
        self._environment = _environment()
        self._any_role = any_role
        compiled = {name: _compile(self._environment, name, source) for name, source in templates.items()}
        self._templates = {name: template for name, (template, _) in compiled.items()}
        self._roles = frozenset(role for _, roles in compiled.values() for role in roles)
        self._special_tokens = {**dict.fromkeys(_ROLES, ""), **special_tokens}
        self._call = EXAMPLE
        self._describes = False
        self._adapts = adapts
        self._overruns = 0
        self._lenient = False
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
        """The prompt's text, special tokens included; parameters and errors as of `render_conversation`."""
        return self.render_conversation(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        ).text

    def render_conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedConversation:
        """The prompt, adapted to what the template takes: see docs/templates.md.

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
        turns, own, tools = self._with_tools(messages, tools)
        final = turns[-1]["content"] if turns else ""
        if continue_final_message:
            turns[-1]["content"] = final + CONTINUE_MARK
        every: dict[str, Any] = {
            **variables,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        if not self._input.shows:
            made = RenderedConversation(self._rendered(turns, tools, every))
        else:
            conversation = Conversation(
                units_of(turns, -own),
                lambda written: self._rendered(written, tools, every),
                tools=bool(tools),
                prompt=None if continue_final_message else add_generation_prompt,
            )
            made = conversation.rendered(self._adapter, adapts=self._adapts, lenient=self._lenient)
        return replace(made, text=cut_at_mark(made.text, final)) if continue_final_message else made

    def write(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """What the template makes of messages as they are, with the tools if it shows any. Raises InvalidRequest where
        it refuses them."""
        turns = [normalize(message, text_arguments=self.shows.text_arguments) for message in messages]
        tools = tools if self.shows.tools else None
        return self._rendered(turns, tools, {"documents": None, "add_generation_prompt": add_generation_prompt})

    def with_template(self, source: str) -> ChatRenderer:
        """A renderer with a caller's template instead of the model's. Raises InvalidRequest for invalid Jinja."""
        try:
            renderer = ChatRenderer(
                {"default": source},
                self._special_tokens,
                any_role=self._any_role,
                variables=self._variables,
                content=self._content,
                adapts=self._adapts,
            )
        except ModelError as error:
            raise InvalidRequest(error.message, param="chat_template") from error
        renderer._call = self._call
        renderer._lenient = True  # what a caller's own template leaves out, it may leave out on purpose
        return renderer

    def describing_tools(self, call: str, *, always: bool) -> ChatRenderer:
        """A renderer that describes tools in the system message where the template does not show them, or `always`.

        `call`: how a call is to be written.
        """
        renderer = copy(self)
        renderer.__dict__.pop("_adapter", None)
        renderer._call, renderer._describes = call, always
        return renderer

    @cached_property
    def shows(self) -> TemplateAbilities:
        return abilities_of(
            lambda turns, tools: self._tried(turns, tools, {}), tool_template="tool_use" in self._templates
        )

    @cached_property
    def _adapter(self) -> Adapter:
        writer = Writer(self._call, self.shows.text_arguments)
        return Adapter(self._probe, writer, text_results=self._describes and not self.shows.calls)

    def _probe(self, messages: list[Message], tools: bool, prompt: bool) -> str | None:
        shown = [probe_tool()] if tools else None
        return self._tried(messages, shown, {"documents": None, "add_generation_prompt": prompt})

    def _tried(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        form: TemplateInput | None = None,
    ) -> str | None:
        """What the template makes of a short made-up conversation; None where it refuses it."""
        if self._overruns >= MAX_OVERRUNS:
            return None
        try:
            return self._rendered(messages, tools, variables, PROBE_STEPS, form)
        except InvalidRequest as error:
            self._overruns += isinstance(error.__cause__, TooManySteps)
            return None

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[Message], bool, Sequence[dict[str, Any]] | None]:
        """The messages with the tools that the template does not show described in them, whether that is a message of
        its own before them, and the tools that it is to show."""
        calls = bool(tools) or any(has_calls(message) or message.get("role") in RESULT_ROLES for message in messages)
        turns = [normalize(each, text_arguments=calls and self.shows.text_arguments) for each in messages]
        if not tools:
            return turns, False, None
        tools = with_descriptions(
            tools, tool=not self.shows.undescribed, parameters=not self.shows.undescribed_parameters
        )
        if not self._describes and self.shows.tools:
            return turns, False, tools
        whole = described(turns, tools, self._call)
        return whole, len(whole) > len(turns), None

    @cached_property
    def _input(self) -> TemplateInput:
        if self._content == "auto":
            return input_of(lambda form, turns: self._tried(turns, None, {}, form))
        parts = self._content == "openai"
        form = input_of(lambda form, turns: self._tried(turns, None, {}, replace(form, parts=parts)))
        return replace(form, parts=parts)

    def _rendered(
        self,
        turns: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        steps: int = MAX_STEPS,
        form: TemplateInput | None = None,
    ) -> str:
        taken = (form or self._input).variables(turns, tools)
        template = self._template(tools)
        try:
            return self._environment.render(
                template,
                {
                    **self._special_tokens,
                    **taken,
                    **variables,
                    "messages": ReadOnlyList(taken["messages"]),
                    "tools": taken["tools"],
                },
                steps,
            )
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
    return datetime.fromtimestamp(clock.time()).strftime(format)
