from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.conversation.adaptation_rules import AdaptationRule, Fix
from quire.engine.text.conversation.message_units import Message, MessageUnit
from quire.engine.text.conversation.planner import Adaptation, ConversationPlan, ConversationPlanner
from quire.engine.text.conversation.text_presence import find_missing_message_indices
from quire.engine.text.template_sandbox import TemplateStepLimitExceeded

MAX_RENDERINGS = 6
"""Each rendering bans rules that failed before."""
_MAX_SEARCHED_UNITS = 256
"""Refusals of longer conversations are blamed on the last unit."""
ADAPTATION_OFF_MESSAGE = (
    "the chat template does not accept this conversation unchanged, and the server runs with --adapt-conversations off"
)


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    text: str
    adaptations: Sequence[Adaptation] = ()
    moved_texts: Sequence[str] = ()


class ConversationRenderer:
    def __init__(
        self, units: Sequence[MessageUnit], render: Callable[[list[Message]], str], *, tools: bool, prompt: bool | None
    ) -> None:
        """`render` raises InvalidRequest if the template refuses. `prompt`: whether a generation prompt follows; None:
        the last message is continued.
        """
        self._units = units
        self._render_messages = render
        self._shows_tools = tools
        self._add_generation_prompt = prompt

    def render(self, planner: ConversationPlanner, *, adapt: bool, allow_missing: bool) -> RenderedConversation:
        """Raises InvalidRequest with messages[i] that no rule renders (unless `allow_missing`) or that need a rule
        (without `adapt`).
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
