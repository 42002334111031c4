"""Finds rules by which a chat template accepts each unit, by rendering made-up texts. A rule depends only on what
precedes the unit, so a growing conversation keeps its prompts' prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from quire.engine.text.conversation.adaptation_rules import AS_SENT, FILLER_TEXTS, AdaptationRule, Fix, candidate_rules
from quire.engine.text.conversation.message_units import SYSTEM_ROLES, Message, MessageUnit, UnitShape, unit_shape
from quire.engine.text.conversation.probe_units import ProbeUnit, make_probe_unit, shows_in_order, without_image_parts
from quire.engine.text.conversation.unit_writer import UnitWriter

RenderProbe = Callable[[list[Message], bool, bool], str | None]
"""Maps (messages, tools, generation prompt) to text; None if the template refuses."""
PlanStep = tuple[UnitShape, AdaptationRule]
BannedRules = Mapping[int, Set[AdaptationRule | tuple[Fix, ...]]]
"""Keyed by index of a message unit: rules or fixes that failed when the actual conversation was rendered."""

MAX_CACHED_STATES = 2000
_MAX_STATE_STEPS = 12
_USER, _ASSISTANT = UnitShape("user"), UnitShape("assistant")
_FOLLOWING_SHAPES: dict[str, tuple[tuple[UnitShape, ...], ...]] = {
    "user": ((_ASSISTANT, _USER),),
    "assistant": ((_USER,),),
    "tool": ((_ASSISTANT, _USER), (_USER, _ASSISTANT)),
    "function": ((_ASSISTANT, _USER), (_USER, _ASSISTANT)),
    "system": ((_USER,),),
    "developer": ((_USER,),),
}
"""Rules after which the template accepts one of these continuations are preferred."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    messages: list[Message]
    unit_indices: list[int]
    rules: list[AdaptationRule]
    adaptations: list[Adaptation]
    first_unsure_unit: int | None = None
    moved_texts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _AutomatonState:
    steps: tuple[PlanStep, ...]
    transitions: dict[UnitShape, tuple[AdaptationRule, _AutomatonState, bool]] = field(default_factory=dict)
    closing_messages: dict[bool, list[Message]] = field(default_factory=dict)
    """Keyed by whether a generation prompt follows."""


class ConversationPlanner:
    def __init__(self, render: RenderProbe, writer: UnitWriter, *, text_results: bool) -> None:
        self._render = render
        self._writer = writer
        self._text_results = text_results
        self._states: dict[tuple[bool, tuple[PlanStep, ...]], _AutomatonState] = {}

    def plan(
        self, units: Sequence[MessageUnit], *, tools: bool, prompt: bool | None, banned_rules: BannedRules
    ) -> ConversationPlan:
        """`prompt`: whether a generation prompt follows; None means that the last message is continued."""
        state = self._get_state(tools, ())
        plan = ConversationPlan([], [], [], [])
        first_unsure_unit = None
        text_arguments = self._writer.text_arguments
        for unit_index, unit in enumerate(units):
            shape = unit_shape(unit, text_arguments=text_arguments)
            if unit_index in banned_rules:
                rule, sure = self._choose_rule_and_certainty(state, shape, tools, banned_rules[unit_index])
                state = self._state_after_rule(state, shape, rule, tools)
            else:
                if shape not in state.transitions:
                    self._learn_transition(state, shape, tools)
                rule, state, sure = state.transitions[shape]
            if not sure and first_unsure_unit is None:
                first_unsure_unit = unit_index
            if rule is AS_SENT:
                plan.messages.extend(unit.messages)
                plan.unit_indices.extend([unit_index] * len(unit.messages))
            else:
                self._append_rewritten_unit(plan, units, unit_index, rule)
            plan.rules.append(rule)
        if prompt is not None:
            closing = self._get_closing_messages(state, tools, prompt)
            plan.messages.extend(closing)
            plan.unit_indices.extend([len(units) - 1] * len(closing))
        return ConversationPlan(
            plan.messages, plan.unit_indices, plan.rules, plan.adaptations, first_unsure_unit, plan.moved_texts
        )

    def _append_rewritten_unit(
        self, plan: ConversationPlan, units: Sequence[MessageUnit], unit_index: int, rule: AdaptationRule
    ) -> None:
        unit = units[unit_index]
        written = self._writer.write_unit(unit, rule, plan.messages)
        if written is None:
            written = self._writer.write_unit(unit, AdaptationRule(rule.fixes), plan.messages)
            assert written is not None
        joins_own = bool(written.num_replaced) and not rule.fixes and units[plan.unit_indices[-1]].is_tool_description
        if written.num_replaced:
            del plan.messages[-written.num_replaced :], plan.unit_indices[-written.num_replaced :]
        plan.messages.extend(written.messages)
        plan.unit_indices.extend([unit_index] * len(written.messages))
        plan.moved_texts.extend(written.moved_texts)
        if not unit.is_tool_description and not joins_own:
            plan.adaptations.append(Adaptation(unit.index, rule.label(str(unit.messages[0].get("role")))))

    def _get_state(self, tools: bool, steps: tuple[PlanStep, ...]) -> _AutomatonState:
        if len(self._states) > MAX_CACHED_STATES:
            self._states.clear()
        return self._states.setdefault((tools, steps), _AutomatonState(steps))

    def _state_after_rule(
        self, state: _AutomatonState, shape: UnitShape, rule: AdaptationRule, tools: bool
    ) -> _AutomatonState:
        return self._get_state(tools, _abbreviate_steps((*state.steps, (shape, rule))))

    def _learn_transition(self, state: _AutomatonState, shape: UnitShape, tools: bool) -> None:
        rule, sure = self._choose_rule_and_certainty(state, shape, tools, frozenset())
        if len(state.transitions) > MAX_CACHED_STATES:  # happens only if callers may invent roles
            state.transitions.clear()
        state.transitions[shape] = rule, self._state_after_rule(state, shape, rule, tools), sure

    def _choose_rule_and_certainty(
        self, state: _AutomatonState, shape: UnitShape, tools: bool, banned: Set[AdaptationRule | tuple[Fix, ...]]
    ) -> tuple[AdaptationRule, bool]:
        """Returns the first rule that the template accepts together with a usual continuation, otherwise the first that
        it accepts, otherwise one with which it omits only the calls' arguments. Returns (AS_SENT, False) if there is
        none.
        """
        fallback: AdaptationRule | None = None
        partial: AdaptationRule | None = None
        for rule in candidate_rules(shape, text_results=self._text_results, prefer_merge=_prefers_merging(state.steps)):
            if rule in banned or rule.fixes in banned:
                continue
            if partial is not None and "calls_as_text" in rule.fixes:
                break
            suits, goes_on = self._rule_suits_and_continues(state.steps, shape, rule, tools)
            if suits and goes_on:
                return (AS_SENT if rule == AS_SENT else rule), True
            if suits and fallback is None:
                fallback = rule
            if shape.num_calls and partial is None and not suits:
                partial = (
                    rule if self._rule_suits_and_continues(state.steps, shape, rule, tools, partly=True)[1] else None
                )
        fallback = fallback or partial
        if fallback is not None:
            return (AS_SENT if fallback == AS_SENT else fallback), True
        return AS_SENT, False

    def _rule_suits_and_continues(
        self, steps: tuple[PlanStep, ...], shape: UnitShape, rule: AdaptationRule, tools: bool, *, partly: bool = False
    ) -> tuple[bool, bool]:
        trial = self._write_trial_of_steps((*steps, (shape, rule)))
        if trial is None:
            return False, False
        messages, probe_units = trial
        if partly:
            probe_units[-1] = probe_units[-1].without_expected_arguments()
        if shape.role not in SYSTEM_ROLES:
            probe_units = [one for one in probe_units[:-1] if not one.any_position] + probe_units[-1:]
        role = str(messages[-1].get("role")) if messages else ""
        pending = bool(messages) and bool(messages[-1].get("tool_calls"))
        alone = self._shows_all_texts(messages, probe_units, tools, images=shape.result_content == "parts")
        ways = () if pending else _FOLLOWING_SHAPES.get(role, ())
        lengths = [self._count_accepted_following_shapes(messages, probe_units, way, tools) for way in ways]
        ends_here = alone or (bool(ways) and role != "user" and not (shape.num_calls and role != "assistant"))
        goes_on = not ways or any(length == len(way) for length, way in zip(lengths, ways, strict=True))
        stays = shape.role not in SYSTEM_ROLES or self._keeps_prefix(steps, messages, tools)
        return alone or any(lengths), ends_here and goes_on and stays

    def _keeps_prefix(self, steps: tuple[PlanStep, ...], messages: list[Message], tools: bool) -> bool:
        """False if a system message that is not first changes earlier text, as in some templates."""
        if all(shape.role in SYSTEM_ROLES for shape, _ in steps):
            return True
        trial = self._write_trial_of_steps(steps)
        before = None if trial is None else self._render(trial[0], tools, False)
        text = self._render(messages, tools, False)
        if trial is None or before is None or text is None:
            return True
        ends = [before.rfind(one) + len(one) for each in trial[1] for texts in each.expected_texts for one in texts]
        return text.startswith(before[: max(ends, default=0)])

    def _count_accepted_following_shapes(
        self, messages: list[Message], probe_units: list[ProbeUnit], way: Sequence[UnitShape], tools: bool
    ) -> int:
        for length, shape in enumerate(way):
            behind = self._extended_trial_or_none(messages, probe_units, shape, tools)
            if behind is None:
                return length
            messages, probe_units = behind
        return len(way)

    def _extended_trial_or_none(
        self, messages: list[Message], probe_units: list[ProbeUnit], shape: UnitShape, tools: bool
    ) -> tuple[list[Message], list[ProbeUnit]] | None:
        one = self._make_probe_unit(shape, 100 + len(probe_units))
        for rule in (AS_SENT, AdaptationRule((), "merged")):
            written = self._writer.write_unit(one.unit, rule, messages)
            if written is not None:
                whole = [*messages[: len(messages) - written.num_replaced], *written.messages]
                if self._shows_all_texts(whole, [*probe_units, one], tools):
                    return whole, [*probe_units, one]
        return None

    def _shows_all_texts(
        self,
        messages: list[Message],
        probe_units: Sequence[ProbeUnit],
        tools: bool,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> bool:
        text = self._render(messages, tools, prompt)
        if text is None or not shows_in_order(text, probe_units):
            return False
        if images:
            bare = self._render(without_image_parts(messages), tools, prompt)
            return bare is None or len(bare) < len(text)
        return True

    def _write_trial_of_steps(self, steps: Sequence[PlanStep]) -> tuple[list[Message], list[ProbeUnit]] | None:
        """None if the last rule does not fit."""
        messages: list[Message] = []
        probe_units: list[ProbeUnit] = []
        for place, (shape, rule) in enumerate(steps):
            one = self._make_probe_unit(shape, place)
            written = self._writer.write_unit(one.unit, rule, messages)
            if written is None and place == len(steps) - 1:
                return None
            written = written or self._writer.write_unit(one.unit, AdaptationRule(rule.fixes), messages)
            assert written is not None
            messages = [*messages[: len(messages) - written.num_replaced], *written.messages]
            probe_units.append(one)
        return messages, probe_units

    def _make_probe_unit(self, shape: UnitShape, serial: int) -> ProbeUnit:
        return make_probe_unit(shape, serial, first=serial == 0, text_arguments=self._writer.text_arguments)

    def _get_closing_messages(self, state: _AutomatonState, tools: bool, prompt: bool) -> list[Message]:
        if prompt not in state.closing_messages:
            state.closing_messages[prompt] = self._find_closing_messages(state, tools, prompt)
        return state.closing_messages[prompt]

    def _find_closing_messages(self, state: _AutomatonState, tools: bool, prompt: bool) -> list[Message]:
        trial = self._write_trial_of_steps(state.steps)
        if trial is None:
            return []
        messages, probe_units = trial
        probe_units = [one for one in probe_units if not one.any_position] or probe_units
        if self._shows_all_texts(messages, probe_units, tools, prompt=prompt):
            return []
        for filler in FILLER_TEXTS["user"]:
            message = {"role": "user", "content": filler}
            if self._shows_all_texts([*messages, message], probe_units, tools, prompt=prompt):
                return [message]
        return []


def _prefers_merging(steps: Sequence[PlanStep]) -> bool:
    if not steps:
        return False
    shape, rule = steps[-1]
    return "results_as_text" in rule.fixes or (shape.is_tool_description and "user" in rule.fixes)


def _abbreviate_steps(steps: tuple[PlanStep, ...]) -> tuple[PlanStep, ...]:
    """Keeps the first and last exchange, and two of each repetition, because templates may treat these differently."""
    start = next((place for place, (shape, _) in enumerate(steps) if shape.role not in SYSTEM_ROLES), len(steps))
    head, rest = steps[:start], steps[start:]
    begins = [0, *_exchange_starts(rest)]
    if len(begins) > 3:
        rest = (*rest[: begins[1]], *rest[begins[-2] :])
    for period in (1, 2, 3):
        while (
            len(rest) > 2 * period and rest[-period:] == rest[-2 * period : -period] == rest[-3 * period : -2 * period]
        ):
            rest = rest[:-period]
    if len(rest) > _MAX_STATE_STEPS:
        rest = (*rest[:2], *rest[2 - _MAX_STATE_STEPS :])
    while len(head) > 2 and head[-1] == head[-2]:
        head = head[:-1]
    return (*head, *rest)


def _exchange_starts(steps: Sequence[PlanStep]) -> Iterator[int]:
    for place in range(1, len(steps)):
        before, shape = steps[place - 1][0], steps[place][0]
        if shape.role == "user" and before.role == "assistant" and not before.num_calls:
            yield place
