"""Renders messages like transformers' chat_template_utils, without importing it."""

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

from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.text.conversation.chat_messages import RESERVED_VARIABLES, normalize_message
from quire.engine.text.conversation.conversation_renderer import ConversationRenderer, RenderedConversation
from quire.engine.text.conversation.message_units import RESULT_ROLES, Message, has_calls, split_into_units
from quire.engine.text.conversation.planner import ConversationPlanner
from quire.engine.text.conversation.template_capabilities import (
    TemplateCapabilities,
    TemplateInputFormat,
    detect_capabilities,
    detect_input_format,
    make_probe_tool,
)
from quire.engine.text.conversation.template_sandbox import MAX_STEPS, BoundedEnvironment, TemplateStepLimitExceeded
from quire.engine.text.conversation.tool_prompt import (
    HERMES_CALL_FORMAT,
    fill_missing_descriptions,
    put_tools_in_system_message,
)
from quire.engine.text.conversation.unit_writer import UnitWriter
from quire.engine.unsupported_options import suggest_nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TOKEN_VARIABLES = ("bos_token", "eos_token")
"""If a token is missing, its variable is "", because templates concatenate it."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""The same mark as in transformers."""
MAX_PROBE_STEPS = 100_000
"""Suffices to render a few made-up messages."""
MAX_PROBE_OVERRUNS = 8
"""Probing stops after this many probes that exceeded the step limit."""


class ChatRenderer:
    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        allow_unknown_roles: bool = False,
        variables: Mapping[str, Any] | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        adapt_conversations: bool = True,
    ) -> None:
        """`variables`: defaults for `render_conversation`. Raises ModelError for a template that is invalid Jinja or
        never ends.
        """
        self._variables, self._content_format = dict(variables or {}), content_format
        self._environment = _make_environment()
        self._allow_unknown_roles = allow_unknown_roles
        compiled = {
            name: _compile_template_and_find_roles(self._environment, name, source)
            for name, source in templates.items()
        }
        self._templates = {name: template for name, (template, _) in compiled.items()}
        self._template_roles = frozenset(role for _, roles in compiled.values() for role in roles)
        self._special_tokens = {**dict.fromkeys(_TOKEN_VARIABLES, ""), **special_tokens}
        self._call_format = HERMES_CALL_FORMAT
        self._always_describe_tools = False
        self._adapt_conversations = adapt_conversations
        self._num_overruns = 0
        self._allow_missing_texts = False
        for name, template in self._templates.items():
            self._check_step_budget(name, template)

    @property
    def has_template(self) -> bool:
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
        """With continue_final_message, the prompt ends where the last message's content ends.

        Raises InvalidRequest for an unknown role, a reserved variable, a missing template, or messages that the
        template refuses or omits.
        """
        variables = {**self._variables, **(variables or {})}
        for name in sorted(RESERVED_VARIABLES):
            if name in variables:
                raise InvalidRequest(
                    f"chat_template_kwargs must not set {name}: it has its own parameter",
                    param="chat_template_kwargs",
                )
        if not self._allow_unknown_roles:
            _check_roles(messages, self._template_roles)
        turns, has_tool_message, tools = self._normalize_with_tools(messages, tools)
        final = turns[-1]["content"] if turns else ""
        if continue_final_message:
            turns[-1]["content"] = final + CONTINUE_MARK
        all_variables: dict[str, Any] = {
            **variables,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        if not self._input_format.shows_user_text:
            rendered = RenderedConversation(self._render_template(turns, tools, all_variables))
        else:
            conversation = ConversationRenderer(
                split_into_units(turns, -has_tool_message),
                lambda written: self._render_template(written, tools, all_variables),
                tools=bool(tools),
                prompt=None if continue_final_message else add_generation_prompt,
            )
            rendered = conversation.render(
                self._planner, adapt=self._adapt_conversations, allow_missing=self._allow_missing_texts
            )
        return (
            replace(rendered, text=cut_at_continue_mark(rendered.text, final)) if continue_final_message else rendered
        )

    def render_unadapted(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises InvalidRequest if the template refuses the messages."""
        turns = [normalize_message(message, text_arguments=self.capabilities.text_arguments) for message in messages]
        tools = tools if self.capabilities.shows_tools else None
        return self._render_template(turns, tools, {"documents": None, "add_generation_prompt": add_generation_prompt})

    def with_template(self, source: str) -> ChatRenderer:
        """Raises InvalidRequest if the template is invalid Jinja or never ends."""
        try:
            renderer = ChatRenderer(
                {"default": source},
                self._special_tokens,
                allow_unknown_roles=self._allow_unknown_roles,
                variables=self._variables,
                content_format=self._content_format,
                adapt_conversations=self._adapt_conversations,
            )
        except ModelError as error:
            raise InvalidRequest(error.message, param="chat_template") from error
        renderer._call_format = self._call_format
        renderer._allow_missing_texts = True  # a caller's template may omit texts on purpose
        return renderer

    def renderer_with_described_tools(self, call_format: str, *, always: bool) -> ChatRenderer:
        """Describes tools in the system message if the template does not show them, or `always`."""
        renderer = copy(self)
        renderer.__dict__.pop("_planner", None)
        renderer._call_format, renderer._always_describe_tools = call_format, always
        return renderer

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        return detect_capabilities(
            lambda turns, tools: self._try_render(turns, tools, {}), tool_template="tool_use" in self._templates
        )

    @cached_property
    def _planner(self) -> ConversationPlanner:
        writer = UnitWriter(self._call_format, self.capabilities.text_arguments)
        return ConversationPlanner(
            self._render_probe, writer, text_results=self._always_describe_tools and not self.capabilities.shows_calls
        )

    def _render_probe(self, messages: list[Message], tools: bool, prompt: bool) -> str | None:
        probe_tools = [make_probe_tool()] if tools else None
        return self._try_render(messages, probe_tools, {"documents": None, "add_generation_prompt": prompt})

    def _try_render(
        self,
        messages: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        input_format: TemplateInputFormat | None = None,
    ) -> str | None:
        if self._num_overruns >= MAX_PROBE_OVERRUNS:
            return None
        try:
            return self._render_template(messages, tools, variables, MAX_PROBE_STEPS, input_format)
        except InvalidRequest as error:
            self._num_overruns += isinstance(error.__cause__, TemplateStepLimitExceeded)
            return None

    def _normalize_with_tools(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[list[Message], bool, Sequence[dict[str, Any]] | None]:
        """The bool is True if a message was inserted to describe tools."""
        calls = bool(tools) or any(has_calls(message) or message.get("role") in RESULT_ROLES for message in messages)
        turns = [
            normalize_message(each, text_arguments=calls and self.capabilities.text_arguments) for each in messages
        ]
        if not tools:
            return turns, False, None
        tools = fill_missing_descriptions(
            tools, tool=not self.capabilities.undescribed_tools, parameters=not self.capabilities.undescribed_parameters
        )
        if not self._always_describe_tools and self.capabilities.shows_tools:
            return turns, False, tools
        turns_with_tools = put_tools_in_system_message(turns, tools, self._call_format)
        return turns_with_tools, len(turns_with_tools) > len(turns), None

    @cached_property
    def _input_format(self) -> TemplateInputFormat:
        if self._content_format == "auto":
            return detect_input_format(lambda form, turns: self._try_render(turns, None, {}, form))
        parts = self._content_format == "openai"
        form = detect_input_format(
            lambda form, turns: self._try_render(turns, None, {}, replace(form, content_parts=parts))
        )
        return replace(form, content_parts=parts)

    def _render_template(
        self,
        turns: list[Message],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        max_steps: int = MAX_STEPS,
        input_format: TemplateInputFormat | None = None,
    ) -> str:
        input_variables = (input_format or self._input_format).make_template_variables(turns, tools)
        template = self._select_template(tools)
        try:
            return self._environment.render_template(
                template,
                {
                    **self._special_tokens,
                    **input_variables,
                    **variables,
                    "messages": ReadOnlyList(input_variables["messages"]),
                    "tools": input_variables["tools"],
                },
                max_steps,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"The chat template refused the messages: {error}", param="messages") from error
        except Exception as error:
            raise InvalidRequest(
                f"The chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _check_step_budget(self, name: str, template: jinja2.Template) -> None:
        turns = [{"role": "user", "content": "Hi"}]
        others = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._environment.render_template(template, {**self._special_tokens, **others})
        except TemplateStepLimitExceeded as error:
            raise ModelError(f"model: the chat template {name!r} cannot be rendered: {error}") from None
        except Exception:
            return

    def _select_template(self, tools: Sequence[dict[str, Any]] | None) -> jinja2.Template:
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise InvalidRequest(
                "This model has no chat template: use /v1/completions, or serve a model whose files have one",
                param="messages",
            )
        return template


def cut_at_continue_mark(text: str, final: str) -> str:
    """Raises InvalidRequest if the text lacks the unchanged message."""
    mark_start = text.rfind(CONTINUE_MARK.strip())
    if mark_start < 0 or final.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the chat template changes the text of the final message",
            param="continue_final_message",
        )
    # If the mark's trailing space is missing, the template trims messages.
    return text[:mark_start] if text.startswith(CONTINUE_MARK, mark_start) else text[:mark_start].rstrip()


class GenerationBlock(jinja2.ext.Extension):
    """A block that marks text for training. In prompts only its body appears."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ReadOnlyList(list[Any]):
    """A list that templates cannot change, as in transformers."""


class ChatTemplateSandbox(BoundedEnvironment):
    """Unlike in transformers, templates may change lists that they create, because Kimi K2's template collects call ids
    in one.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        own = type(obj) is list and attr in ("append", "extend", "insert", "pop")
        return own or super().is_safe_attribute(obj, attr, value)


def _check_roles(messages: Sequence[Mapping[str, Any]], template_roles: Set[str]) -> None:
    """Most templates would write an unknown role into the prompt, and answers would be worse."""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in template_roles:
            hint = (
                suggest_nearest(role.lower(), ROLES)
                or f"it must be one of {', '.join(ROLES)}, or named by the chat template, unless the server has "
                "--allow-unknown-roles"
            )
            raise InvalidRequest(f"messages[{number}].role: unknown role {role!r}; {hint}", param="messages")


def _find_string_literals(template: nodes.Template) -> frozenset[str]:
    """String literals include all roles that the template treats specially."""
    texts = [each.value for each in template.find_all(nodes.Const)]
    return frozenset(text for text in texts if isinstance(text, str) and text.strip())


def _compile_template_and_find_roles(
    environment: ChatTemplateSandbox, name: str, source: str
) -> tuple[jinja2.Template, Set[str]]:
    try:
        tree = environment.parse(source)
        roles = _find_string_literals(tree)  # the compiler would fold lists of literals
        return environment.from_string(tree), roles
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"model: the chat template {name!r} is not valid, line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, MemoryError, SyntaxError):  # raised by deep nesting
        raise ModelError(f"model: the chat template {name!r} is nested too deeply") from None


def _make_environment() -> ChatTemplateSandbox:
    extensions = [GenerationBlock, jinja2.ext.loopcontrols]
    environment = ChatTemplateSandbox({"tojson": _tojson}, trim_blocks=True, lstrip_blocks=True, extensions=extensions)
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
