"""Renders a conversation by rules that its chat template takes, and looks whether all of its texts are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.errors import InvalidRequest
from quire.engine.text.conversation.adapter import Adaptation, Adapter, Plan
from quire.engine.text.conversation.presence import missing
from quire.engine.text.conversation.rules import Fix, Rule
from quire.engine.text.conversation.units import Message, Unit
from quire.engine.text.template_bounds import TooManySteps

MAX_TRIES = 6
"""Renderings of one conversation, each by another rule for what the one before did not show."""
_MOST_SEARCHED = 256
"""Units among which the one that a template refuses is looked for."""
OFF = "the chat template does not take it as it is, and the server has --adapt-conversations off"


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    text: str
    adaptations: Sequence[Adaptation] = ()
    """What was not written as it was sent."""
    moved: Sequence[str] = ()
    """Texts that stand in a message of another role than they were sent in: special tokens in them are text."""


class Conversation:
    """One request's conversation, on its way through a template."""

    def __init__(
        self, units: Sequence[Unit], render: Callable[[list[Message]], str], *, tools: bool, prompt: bool | None
    ) -> None:
        """`render` raises InvalidRequest where the template refuses. `tools`: it shows some. `prompt`: with a
        generation prompt; None: the last message is continued."""
        self._units = units
        self._render = render
        self._tools = tools
        self._prompt = prompt

    def rendered(self, adapter: Adapter, *, adapts: bool, lenient: bool) -> RenderedConversation:
        """Raises InvalidRequest naming messages[i] for what the template does not show by any rule, unless that is
        `lenient`, and where not `adapts` for what it does not show as it is."""
        bans: dict[int, set[Rule | tuple[Fix, ...]]] = {}
        first: RenderedConversation | None = None
        for _ in range(MAX_TRIES):
            plan = adapter.plan(self._units, tools=self._tools, prompt=self._prompt, bans=bans)
            if not adapts and plan.adaptations:
                raise self._refusal(plan.adaptations[0].index, f"{OFF}: {plan.adaptations[0].label}")
            text = self._text(plan)
            error = text if isinstance(text, InvalidRequest) else None
            if isinstance(text, str):
                made = RenderedConversation(text, plan.adaptations, plan.moved)
                first = first or made
                places = sorted({plan.owners[index] for index in missing(text, plan.messages)})
                if not places:
                    return made
            else:
                places = [self._refused(plan)]
            if not adapts or (plan.unsure is not None and plan.unsure <= places[0]):
                break
            for place in places:
                rule = plan.rules[place]
                bans.setdefault(place, set()).add(rule if error is not None else rule.fixes)
        if lenient and first is not None:
            return first
        raise self._explained(places[0], error) from error

    def _text(self, plan: Plan) -> str | InvalidRequest:
        try:
            return self._render(plan.messages)
        except InvalidRequest as error:
            if isinstance(error.__cause__, TooManySteps):
                raise
            return error

    def _refused(self, plan: Plan) -> int:
        """The place of the unit that the template refuses."""
        if plan.unsure is not None:
            return plan.unsure
        last = len(self._units) - 1
        if last >= _MOST_SEARCHED:
            return last
        low, high = 0, last  # the template takes what precedes `low`, and refuses all up to `high`
        while low < high:
            middle = (low + high) // 2
            if self._takes(plan, middle):
                low = middle + 1
            else:
                high = middle
        return high

    def _takes(self, plan: Plan, place: int) -> bool:
        """Whether the template takes the units up to a place."""
        try:
            self._render([message for message, owner in zip(plan.messages, plan.owners, strict=True) if owner <= place])
        except InvalidRequest:
            return False
        return True

    def _explained(self, place: int, error: InvalidRequest | None) -> InvalidRequest:
        return self._refusal(
            self._units[place].index, "the chat template does not show its text" if error is None else error.message
        )

    def _refusal(self, index: int, why: str) -> InvalidRequest:
        return InvalidRequest(f"messages[{max(index, 0)}]: {why}", param="messages")
