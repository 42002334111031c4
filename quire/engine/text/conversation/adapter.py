"""Finds out, with made-up texts, by which rule a chat template takes each unit of a conversation, and writes it so.

How a unit is written depends on what stands before it, so that a prompt grows at its end when a conversation goes on.
The rules that were found are kept: a template's states, each an abbreviation of the conversations that lead to it, with
the rule for each shape that came next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from quire.engine.text.conversation.rules import AS_SENT, FILLERS, Fix, Rule, rules_for
from quire.engine.text.conversation.specimens import Specimen, shown_in_order, specimen, without_images
from quire.engine.text.conversation.units import SYSTEM_ROLES, Message, Shape, Unit, shape_of
from quire.engine.text.conversation.writing import Writer

Render = Callable[[list[Message], bool, bool], str | None]
"""What the template makes of messages, with tools or without, with a generation prompt or without; None: refused."""
Step = tuple[Shape, Rule]
Bans = Mapping[int, Set[Rule | tuple[Fix, ...]]]
"""Rules, or fixes however they are joined, that failed with a conversation's own texts, by the place of the unit."""

MOST_STATES = 2000
"""Kept for one template; then they are forgotten."""
_MOST_STEPS = 12
_USER, _ASSISTANT = Shape("user"), Shape("assistant")
_NEXT: dict[str, tuple[tuple[Shape, ...], ...]] = {
    "user": ((_ASSISTANT, _USER),),
    "assistant": ((_USER,),),
    "tool": ((_ASSISTANT, _USER), (_USER, _ASSISTANT)),
    "function": ((_ASSISTANT, _USER), (_USER, _ASSISTANT)),
    "system": ((_USER,),),
    "developer": ((_USER,),),
}
"""What may follow a message: a rule must suit one of these too, if there is such a rule."""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """A unit that was not written as it was sent."""

    index: int
    """Of its first message in the caller's list."""
    label: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversation as it is to be rendered."""

    messages: list[Message]
    owners: list[int]
    """For each message the place of its unit."""
    rules: list[Rule]
    adaptations: list[Adaptation]
    unsure: int | None = None
    """The place of the first unit for which no rule was found."""
    moved: list[str] = field(default_factory=list)
    """Texts that stand in a message of another role than they were sent in."""


@dataclass(slots=True)
class _State:
    steps: tuple[Step, ...]
    next: dict[Shape, tuple[Rule, _State, bool]] = field(default_factory=dict)
    """The rule for a shape, the state that it leads to, and whether the template takes it."""
    closing: dict[bool, list[Message]] = field(default_factory=dict)
    """What is added at a conversation's end, with a generation prompt and without."""


class Adapter:
    """The rules of one template."""

    def __init__(self, render: Render, writer: Writer, *, text_results: bool) -> None:
        self._render = render
        self._writer = writer
        self._text_results = text_results
        self._states: dict[tuple[bool, tuple[Step, ...]], _State] = {}

    def plan(self, units: Sequence[Unit], *, tools: bool, prompt: bool | None, bans: Bans) -> Plan:
        """How to write the units. `tools`: the template shows some. `prompt`: with a generation prompt; None: the last
        message is continued."""
        state = self._state(tools, ())
        plan = Plan([], [], [], [])
        unsure = None
        text_arguments = self._writer.text_arguments
        for place, unit in enumerate(units):
            shape = shape_of(unit, text_arguments=text_arguments)
            if place in bans:
                rule, sure = self._choose(state, shape, tools, bans[place])
                state = self._after(state, shape, rule, tools)
            else:
                if shape not in state.next:
                    self._learn(state, shape, tools)
                rule, state, sure = state.next[shape]
            if not sure and unsure is None:
                unsure = place
            if rule is AS_SENT:
                plan.messages.extend(unit.messages)
                plan.owners.extend([place] * len(unit.messages))
            else:
                self._add(plan, units, place, rule)
            plan.rules.append(rule)
        if prompt is not None:
            closing = self._closing(state, tools, prompt)
            plan.messages.extend(closing)
            plan.owners.extend([len(units) - 1] * len(closing))
        return Plan(plan.messages, plan.owners, plan.rules, plan.adaptations, unsure, plan.moved)

    def _add(self, plan: Plan, units: Sequence[Unit], place: int, rule: Rule) -> None:
        unit = units[place]
        written = self._writer.write(unit, rule, plan.messages)
        if written is None:
            written = self._writer.write(unit, Rule(rule.fixes), plan.messages)
            assert written is not None
        joins_own = bool(written.replaced) and not rule.fixes and units[plan.owners[-1]].own
        if written.replaced:
            del plan.messages[-written.replaced :], plan.owners[-written.replaced :]
        plan.messages.extend(written.messages)
        plan.owners.extend([place] * len(written.messages))
        plan.moved.extend(written.moved)
        if not unit.own and not joins_own:
            plan.adaptations.append(Adaptation(unit.index, rule.label(str(unit.messages[0].get("role")))))

    def _state(self, tools: bool, steps: tuple[Step, ...]) -> _State:
        if len(self._states) > MOST_STATES:
            self._states.clear()
        return self._states.setdefault((tools, steps), _State(steps))

    def _after(self, state: _State, shape: Shape, rule: Rule, tools: bool) -> _State:
        return self._state(tools, _abbreviated((*state.steps, (shape, rule))))

    def _learn(self, state: _State, shape: Shape, tools: bool) -> None:
        rule, sure = self._choose(state, shape, tools, frozenset())
        if len(state.next) > MOST_STATES:  # only where callers may make up roles
            state.next.clear()
        state.next[shape] = rule, self._after(state, shape, rule, tools), sure

    def _choose(
        self, state: _State, shape: Shape, tools: bool, banned: Set[Rule | tuple[Fix, ...]]
    ) -> tuple[Rule, bool]:
        """The first rule that suits the template, and what mostly follows; without one the first that suits it."""
        fallback: Rule | None = None
        partial: Rule | None = None
        for rule in rules_for(shape, text_results=self._text_results, merging=_merges(state.steps)):
            if rule in banned or rule.fixes in banned:
                continue
            if partial is not None and "calls_as_text" in rule.fixes:
                break
            suits, goes_on = self._try(state.steps, shape, rule, tools)
            if suits and goes_on:
                return (AS_SENT if rule == AS_SENT else rule), True
            if suits and fallback is None:
                fallback = rule
            if shape.calls and partial is None and not suits:
                partial = rule if self._try(state.steps, shape, rule, tools, partly=True)[1] else None
        fallback = fallback or partial
        if fallback is not None:
            return (AS_SENT if fallback == AS_SENT else fallback), True
        return AS_SENT, False

    def _try(
        self, steps: tuple[Step, ...], shape: Shape, rule: Rule, tools: bool, *, partly: bool = False
    ) -> tuple[bool, bool]:
        """Whether a rule suits a shape behind these steps, and whether a conversation can go on after it. `partly`: the
        template may leave arguments of calls out, as it may show only some that it knows, and show calls elsewhere."""
        trial = self._trial((*steps, (shape, rule)))
        if trial is None:
            return False, False
        messages, specimens = trial
        if partly:
            specimens[-1] = specimens[-1].without_arguments()
        if shape.role not in SYSTEM_ROLES:
            specimens = [one for one in specimens[:-1] if not one.anywhere] + specimens[-1:]
        role = str(messages[-1].get("role")) if messages else ""
        pending = bool(messages) and bool(messages[-1].get("tool_calls"))
        alone = self._shows(messages, specimens, tools, images=shape.result_content == "parts")
        ways = () if pending else _NEXT.get(role, ())
        lengths = [self._length(messages, specimens, way, tools) for way in ways]
        ends_here = alone or (bool(ways) and role != "user" and not (shape.calls and role != "assistant"))
        goes_on = not ways or any(length == len(way) for length, way in zip(lengths, ways, strict=True))
        stays = shape.role not in SYSTEM_ROLES or self._stays(steps, messages, tools)
        return alone or any(lengths), ends_here and goes_on and stays

    def _stays(self, steps: tuple[Step, ...], messages: list[Message], tools: bool) -> bool:
        """True if what stood before a late system message stands before it still: some templates write another head."""
        if all(shape.role in SYSTEM_ROLES for shape, _ in steps):
            return True
        trial = self._trial(steps)
        before = None if trial is None else self._render(trial[0], tools, False)
        text = self._render(messages, tools, False)
        if trial is None or before is None or text is None:
            return True
        ends = [before.rfind(one) + len(one) for each in trial[1] for texts in each.wanted for one in texts]
        return text.startswith(before[: max(ends, default=0)])

    def _length(self, messages: list[Message], specimens: list[Specimen], way: Sequence[Shape], tools: bool) -> int:
        """How many messages of these shapes the template takes behind others."""
        for length, shape in enumerate(way):
            behind = self._continued(messages, specimens, shape, tools)
            if behind is None:
                return length
            messages, specimens = behind
        return len(way)

    def _continued(
        self, messages: list[Message], specimens: list[Specimen], shape: Shape, tools: bool
    ) -> tuple[list[Message], list[Specimen]] | None:
        """With a message behind them, merged if need be; None where the template does not show all of it."""
        one = self._specimen(shape, 100 + len(specimens))
        for rule in (AS_SENT, Rule((), "merged")):
            written = self._writer.write(one.unit, rule, messages)
            if written is not None:
                whole = [*messages[: len(messages) - written.replaced], *written.messages]
                if self._shows(whole, [*specimens, one], tools):
                    return whole, [*specimens, one]
        return None

    def _shows(
        self,
        messages: list[Message],
        specimens: Sequence[Specimen],
        tools: bool,
        *,
        prompt: bool = False,
        images: bool = False,
    ) -> bool:
        text = self._render(messages, tools, prompt)
        if text is None or not shown_in_order(text, specimens):
            return False
        if images:
            bare = self._render(without_images(messages), tools, prompt)
            return bare is None or len(bare) < len(text)
        return True

    def _trial(self, steps: Sequence[Step]) -> tuple[list[Message], list[Specimen]] | None:
        """Specimens of these steps, written; None where the last one's rule does not fit them."""
        messages: list[Message] = []
        specimens: list[Specimen] = []
        for place, (shape, rule) in enumerate(steps):
            one = self._specimen(shape, place)
            written = self._writer.write(one.unit, rule, messages)
            if written is None and place == len(steps) - 1:
                return None
            written = written or self._writer.write(one.unit, Rule(rule.fixes), messages)
            assert written is not None
            messages = [*messages[: len(messages) - written.replaced], *written.messages]
            specimens.append(one)
        return messages, specimens

    def _specimen(self, shape: Shape, serial: int) -> Specimen:
        return specimen(shape, serial, first=serial == 0, text_arguments=self._writer.text_arguments)

    def _closing(self, state: _State, tools: bool, prompt: bool) -> list[Message]:
        """What is added where the template does not take a conversation that ends here."""
        if prompt not in state.closing:
            state.closing[prompt] = self._learn_closing(state, tools, prompt)
        return state.closing[prompt]

    def _learn_closing(self, state: _State, tools: bool, prompt: bool) -> list[Message]:
        trial = self._trial(state.steps)
        if trial is None:
            return []
        messages, specimens = trial
        specimens = [one for one in specimens if not one.anywhere] or specimens
        if self._shows(messages, specimens, tools, prompt=prompt):
            return []
        for filler in FILLERS["user"]:
            message = {"role": "user", "content": filler}
            if self._shows([*messages, message], specimens, tools, prompt=prompt):
                return [message]
        return []


def _merges(steps: Sequence[Step]) -> bool:
    """True if a user's message joins what was written before it as a user's."""
    if not steps:
        return False
    shape, rule = steps[-1]
    return "results_as_text" in rule.fixes or (shape.own and "user" in rule.fixes)


def _abbreviated(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps that a template treats alike: of earlier exchanges the first and the last, of what repeats itself two."""
    start = next((place for place, (shape, _) in enumerate(steps) if shape.role not in SYSTEM_ROLES), len(steps))
    head, rest = steps[:start], steps[start:]
    begins = [0, *_exchanges(rest)]
    if len(begins) > 3:
        rest = (*rest[: begins[1]], *rest[begins[-2] :])
    for period in (1, 2, 3):
        while (
            len(rest) > 2 * period and rest[-period:] == rest[-2 * period : -period] == rest[-3 * period : -2 * period]
        ):
            rest = rest[:-period]
    if len(rest) > _MOST_STEPS:
        rest = (*rest[:2], *rest[2 - _MOST_STEPS :])
    while len(head) > 2 and head[-1] == head[-2]:
        head = head[:-1]
    return (*head, *rest)


def _exchanges(steps: Sequence[Step]) -> Iterator[int]:
    """Where users speak behind an assistant's answer."""
    for place in range(1, len(steps)):
        before, shape = steps[place - 1][0], steps[place][0]
        if shape.role == "user" and before.role == "assistant" and not before.calls:
            yield place
