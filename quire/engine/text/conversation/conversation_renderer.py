from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import escape

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.conversation.adaptation_rules import AdaptationRule, Fix
from quire.engine.text.conversation.message_units import Message, MessageUnit, message_calls, tool_call_function
from quire.engine.text.conversation.planner import Adaptation, ConversationPlan, ConversationPlanner
from quire.engine.text.conversation.template_sandbox import TemplateStepLimitExceeded

MAX_RENDERINGS = 6
"""Each one bans the rules that failed in earlier ones."""
_MAX_SEARCHED_UNITS = 256
"""If a longer conversation is refused, the error names the last unit without a search."""
ADAPTATION_OFF_MESSAGE = (
    "the chat template does not accept this conversation unchanged, and the server runs with --adapt-conversations off"
)
_REASONING_ENDS = ("</think>", "[/THINK]", "</thinking>", "</seed:think>")
"""Templates drop the text of an assistant up to the last of these."""
_WORD = re.compile(r"[A-Za-z0-9]+")
_MAX_SEARCHED_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    text: str
    adaptations: Sequence[Adaptation] = ()
    moved_texts: Sequence[str] = ()


class ConversationRenderer:
    def __init__(
        self, units: Sequence[MessageUnit], render: Callable[[list[Message]], str], *, tools: bool, prompt: bool | None
    ) -> None:
        """`render` raises InvalidRequest if the template refuses. `prompt`: whether a generation prompt follows; None
        means that the last message is continued.
        """
        self._units = units
        self._render_messages = render
        self._shows_tools = tools
        self._add_generation_prompt = prompt

    def render(self, planner: ConversationPlanner, *, adapt: bool, allow_missing: bool) -> RenderedConversation:
        """Raises InvalidRequest, which names messages[i], if that message needs a rule and `adapt` is False, if the
        template refuses it under every rule, or if its text would be missing and `allow_missing` is False.
        """
        banned_rules: dict[int, set[AdaptationRule | tuple[Fix, ...]]] = {}
        first: RenderedConversation | None = None
        for _ in range(MAX_RENDERINGS):
            plan = planner.plan(
                self._units, tools=self._shows_tools, prompt=self._add_generation_prompt, banned_rules=banned_rules
            )
            if not adapt and plan.adaptations:
                raise self._refusal_error(
                    plan.adaptations[0].index, f"{ADAPTATION_OFF_MESSAGE}: {plan.adaptations[0].label}"
                )
            text = self._render_plan_or_error(plan)
            error = text if isinstance(text, InvalidRequest) else None
            if isinstance(text, str):
                conversation = RenderedConversation(text, plan.adaptations, plan.moved_texts)
                first = first or conversation
                unit_indices = sorted(
                    {plan.unit_indices[index] for index in find_missing_message_indices(text, plan.messages)}
                )
                if not unit_indices:
                    return conversation
            else:
                unit_indices = [self._find_refused_unit(plan)]
            if not adapt or (plan.first_unsure_unit is not None and plan.first_unsure_unit <= unit_indices[0]):
                break
            for unit_index in unit_indices:
                rule = plan.rules[unit_index]
                banned_rules.setdefault(unit_index, set()).add(rule if error is not None else rule.fixes)
        if allow_missing and first is not None:
            return first
        raise self._unit_refusal_error(unit_indices[0], error) from error

    def _render_plan_or_error(self, plan: ConversationPlan) -> str | InvalidRequest:
        try:
            return self._render_messages(plan.messages)
        except InvalidRequest as error:
            if isinstance(error.__cause__, TemplateStepLimitExceeded):
                raise
            return error

    def _find_refused_unit(self, plan: ConversationPlan) -> int:
        if plan.first_unsure_unit is not None:
            return plan.first_unsure_unit
        last = len(self._units) - 1
        if last >= _MAX_SEARCHED_UNITS:
            return last
        low, high = 0, last
        while low < high:
            middle = (low + high) // 2
            if self._accepts_up_to(plan, middle):
                low = middle + 1
            else:
                high = middle
        return high

    def _accepts_up_to(self, plan: ConversationPlan, unit_index: int) -> bool:
        try:
            self._render_messages(
                [
                    message
                    for message, owner in zip(plan.messages, plan.unit_indices, strict=True)
                    if owner <= unit_index
                ]
            )
        except InvalidRequest:
            return False
        return True

    def _unit_refusal_error(self, unit_index: int, error: InvalidRequest | None) -> InvalidRequest:
        return self._refusal_error(
            self._units[unit_index].index,
            "the chat template does not show its text" if error is None else error.message,
        )

    def _refusal_error(self, index: int, why: str) -> InvalidRequest:
        return InvalidRequest(f"messages[{max(index, 0)}]: {why}", param="messages")


def find_missing_message_indices(text: str, messages: Sequence[Message]) -> list[int]:
    search_start = 0
    missing_indices = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for each in [content] if isinstance(content, str) else _part_texts(content):
            each = each.strip()  # many templates trim
            start = text.find(each, search_start)
            if start >= 0:
                search_start = start + len(each)
            elif not contains_text(text, each, by_assistant=message.get("role") == "assistant"):
                missing_indices.append(index)
        words = list(_argument_words(message)) if message.get("tool_calls") else []
        if words and not any(word in text for word in words):
            missing_indices.append(index)
    return missing_indices


def contains_text(text: str, expected: str, *, by_assistant: bool = False) -> bool:
    """In `text`, `expected` may be trimmed, indented, or escaped as JSON or HTML. If `by_assistant`, leading reasoning
    may be missing.
    """
    if by_assistant:
        for end in _REASONING_ENDS:
            expected = expected.rpartition(end)[2]
    expected = expected.strip()
    if expected in text:
        return True
    if any(json.dumps(expected, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
        return True
    if str(escape(expected)) in text:
        return True
    return _contains_lines(text, expected)


def _contains_lines(text: str, expected: str) -> bool:
    """Templates may indent lines, or split a text at their marks."""
    search_start = 0
    for line in expected.splitlines():
        line = line.strip()
        if not line:
            continue
        start = text.find(line, search_start)
        if start < 0:
            return False
        search_start = start + len(line)
    return True


def _part_texts(content: Any) -> list[str]:
    return [part["text"] for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _argument_words(message: Message) -> Iterator[str]:
    """Yields only one word per argument, because spellings differ, and probes have shown that templates write all
    arguments.
    """
    rest: list[Any] = [tool_call_function(call).get("arguments") for call in message_calls(message)]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            word = _WORD.search(value, 0, _MAX_SEARCHED_CHARACTERS)
            if word is not None:
                yield word[0]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
