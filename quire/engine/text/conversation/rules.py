"""The rules by which a unit of a conversation is written for a chat template, the least change first.

A rule is a few fixes of the unit itself, and a way to join what it writes to the message before. Which one a template
needs is found out by `Adapter`; here is only what there is to try, and how it is written. No rule puts a user's or a
tool's text into a system message.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Literal, NamedTuple

from quire.engine.text.conversation.units import Shape

Fix = Literal[
    "modern",
    "ids",
    "named_ids",
    "arguments",
    "order",
    "result",
    "thought",
    "apart",
    "split",
    "images",
    "calls_as_text",
    "results_as_text",
    "system",
    "user",
    "omitted",
]
Join = Literal["", "merged", "separated"]

FILLERS = {"user": ("", "Continue."), "assistant": ("", "OK.")}
"""What is said, by role, where a template refuses two messages of the other role and they cannot become one. The empty
text is tried first."""
LABELS: dict[Fix, str] = {
    "modern": "function_call->tool_calls",
    "ids": "ids shortened",
    "named_ids": "ids renamed",
    "arguments": "arguments->text",
    "order": "results reordered",
    "result": "missing result",
    "images": "images->user",
    "thought": "content->reasoning",
    "apart": "content->message of its own",
    "split": "calls split",
    "calls_as_text": "calls->text",
    "results_as_text": "result->user",
    "system": "developer->system",
    "user": "{role}->user",
    "omitted": "empty message left out",
}
"""What callers are told."""
_COSTS: dict[Fix, int] = {"thought": 2, "apart": 3, "split": 2, "result": 2, "images": 2, "named_ids": 2}
"""Of fixes, others cost 1: rules are tried from the cheapest on."""
_LONGEST_ROLE = 32
_MOST = 64
"""Rules that are tried, before calls become text."""


class Rule(NamedTuple):
    fixes: tuple[Fix, ...] = ()
    join: Join = ""
    choice: int = 0
    """Which of FILLERS separates the messages."""

    def label(self, role: str) -> str:
        """What callers are told, "" where nothing was changed."""
        names = [LABELS[fix].format(role=role[:_LONGEST_ROLE]) for fix in self.fixes]
        if self.join:
            names.append("merged with the message before" if self.join == "merged" else "a message put before")
        return ", ".join(names)


AS_SENT = Rule()


def rules_for(shape: Shape, *, text_results: bool, merging: bool) -> Iterator[Rule]:
    """The rules that may suit a shape, in the order in which they are tried.

    `text_results`: calls are text, so results must be text too.
    `merging`: a user's message had better be merged with the one before.
    """
    if merging and shape.role == "user":
        yield Rule((), "merged")
    if shape.calls:
        yield from _of_calls(shape, text_results=text_results)
        return
    is_result = shape.role in ("tool", "function")
    kinds = _of_result(shape, text_results=text_results) if is_result else _of_text(shape)
    for fixes in kinds:
        yield Rule(fixes)
        yield from _joined(fixes)
    if shape.content == "empty" and shape.role == "assistant":
        yield Rule(("omitted",))


def _of_text(shape: Shape) -> list[tuple[Fix, ...]]:
    if shape.own:
        return [(), ("user",)]
    if shape.role == "developer":
        return [(), ("system",), ("user",)]
    return [(), ("user",)] if shape.role not in ("user", "assistant") else [()]


def _of_result(shape: Shape, *, text_results: bool) -> list[tuple[Fix, ...]]:
    """Of a result that answers no call."""
    fixes = _optional(shape)
    several = [chosen for size in range(len(fixes) + 1) for chosen in combinations(fixes, size)]
    as_text: tuple[Fix, ...] = ("modern", "results_as_text") if shape.legacy else ("results_as_text",)
    if text_results:
        return [as_text]
    return [*(each for each in several if not _contradicts(each)), as_text]


def _joined(fixes: tuple[Fix, ...]) -> Iterator[Rule]:
    yield Rule(fixes, "merged")
    for filler in range(2):
        yield Rule(fixes, "separated", filler)


def _of_calls(shape: Shape, *, text_results: bool) -> Iterator[Rule]:
    yield from _of_native_calls(shape)
    texts: list[tuple[Fix, ...]] = [("calls_as_text",), ("results_as_text",), ("calls_as_text", "results_as_text")]
    if shape.results == "none":
        texts = [("calls_as_text",)]
    elif text_results:
        texts = [("results_as_text",), ("calls_as_text", "results_as_text")]
    for fixes in texts:
        kept: tuple[Fix, ...] = ("modern", *fixes) if shape.legacy else fixes
        yield Rule(kept)
        yield from _joined(kept)
        if "calls_as_text" not in fixes and (more := _optional(shape)):
            yield Rule((*more, *fixes))
            yield from _joined((*more, *fixes))


def _of_native_calls(shape: Shape) -> Iterator[Rule]:
    rules = []
    fixes = _optional(shape)
    sizes = sorted({0, 1, 2, 3, len(fixes)})
    for size in sizes:
        for chosen in combinations(fixes, size):
            if not _contradicts(chosen):
                cost = sum(_COSTS.get(fix, 1) for fix in chosen)
                rules.append((cost, Rule(chosen)))
                rules += [(cost + place + 1, rule) for place, rule in enumerate(_joined(chosen))]
    rules.sort(key=lambda each: each[0])
    for _, rule in rules[:_MOST]:
        yield rule


def _optional(shape: Shape) -> tuple[Fix, ...]:
    """The fixes that change something of a shape with calls or results."""
    fixes: list[Fix] = []
    if shape.legacy:
        fixes.append("modern")
    if shape.ids != "short":
        fixes += ["ids", "named_ids"]
    if shape.arguments != "object":
        fixes.append("arguments")
    if shape.results in ("reordered", "mixed"):
        fixes.append("order")
    if shape.calls and shape.results in ("none", "partial", "unmatched"):
        fixes.append("result")
    if shape.calls and (shape.content != "empty" or shape.arguments != "object"):
        fixes += ["thought", "apart"] if shape.reasoning else ["apart"]
    if shape.calls > 1:
        fixes.append("split")
    if shape.result_content == "parts":
        fixes.append("images")
    return tuple(fixes)


def _contradicts(fixes: tuple[Fix, ...]) -> bool:
    return {"thought", "apart"} <= set(fixes) or {"ids", "named_ids"} <= set(fixes)


def opposite(role: str) -> Literal["user", "assistant"]:
    """Who speaks between two messages of a role."""
    return "user" if role == "assistant" else "assistant"
