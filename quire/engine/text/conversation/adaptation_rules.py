"""Rules that rewrite a unit for a chat template. No rule moves a user's or tool's text into a system message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Literal, NamedTuple

from quire.engine.text.conversation.message_units import UnitShape

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
JoinMode = Literal["", "merged", "separated"]

FILLER_TEXTS = {"user": ("", "Continue."), "assistant": ("", "OK.")}
"""Texts of a message that is inserted between two messages if a template refuses them in succession and they cannot be
merged. The first text is preferred.
"""
FIX_LABELS: dict[Fix, str] = {
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
_FIX_COSTS: dict[Fix, int] = {"thought": 2, "apart": 3, "split": 2, "result": 2, "images": 2, "named_ids": 2}
_MAX_ROLE_CHARACTERS = 32
_MAX_NATIVE_RULES = 64


class AdaptationRule(NamedTuple):
    fixes: tuple[Fix, ...] = ()
    join: JoinMode = ""
    filler_index: int = 0

    def label(self, role: str) -> str:
        names = [FIX_LABELS[fix].format(role=role[:_MAX_ROLE_CHARACTERS]) for fix in self.fixes]
        if self.join:
            names.append("merged with the message before" if self.join == "merged" else "a message put before")
        return ", ".join(names)


AS_SENT = AdaptationRule()


def candidate_rules(shape: UnitShape, *, text_results: bool, prefer_merge: bool) -> Iterator[AdaptationRule]:
    """Yields rules in the order in which to try them. `text_results`: calls are written as text, so results must be
    too.
    """
    if prefer_merge and shape.role == "user":
        yield AdaptationRule((), "merged")
    if shape.num_calls:
        yield from _call_rules(shape, text_results=text_results)
        return
    is_result = shape.role in ("tool", "function")
    kinds = _orphan_result_fix_sets(shape, text_results=text_results) if is_result else _message_fix_sets(shape)
    for fixes in kinds:
        yield AdaptationRule(fixes)
        yield from _joining_variants(fixes)
    if shape.content == "empty" and shape.role == "assistant":
        yield AdaptationRule(("omitted",))


def _message_fix_sets(shape: UnitShape) -> list[tuple[Fix, ...]]:
    if shape.is_tool_description:
        return [(), ("user",)]
    if shape.role == "developer":
        return [(), ("system",), ("user",)]
    return [(), ("user",)] if shape.role not in ("user", "assistant") else [()]


def _orphan_result_fix_sets(shape: UnitShape, *, text_results: bool) -> list[tuple[Fix, ...]]:
    fixes = _applicable_fixes(shape)
    several = [chosen for size in range(len(fixes) + 1) for chosen in combinations(fixes, size)]
    as_text: tuple[Fix, ...] = ("modern", "results_as_text") if shape.is_legacy else ("results_as_text",)
    if text_results:
        return [as_text]
    return [*(each for each in several if not _are_contradictory(each)), as_text]


def _joining_variants(fixes: tuple[Fix, ...]) -> Iterator[AdaptationRule]:
    yield AdaptationRule(fixes, "merged")
    for filler in range(2):
        yield AdaptationRule(fixes, "separated", filler)


def _call_rules(shape: UnitShape, *, text_results: bool) -> Iterator[AdaptationRule]:
    yield from _native_call_rules(shape)
    text_fixes: list[tuple[Fix, ...]] = [("calls_as_text",), ("results_as_text",), ("calls_as_text", "results_as_text")]
    if shape.results == "none":
        text_fixes = [("calls_as_text",)]
    elif text_results:
        text_fixes = [("results_as_text",), ("calls_as_text", "results_as_text")]
    for fixes in text_fixes:
        all_fixes: tuple[Fix, ...] = ("modern", *fixes) if shape.is_legacy else fixes
        yield AdaptationRule(all_fixes)
        yield from _joining_variants(all_fixes)
        if "calls_as_text" not in fixes and (more := _applicable_fixes(shape)):
            yield AdaptationRule((*more, *fixes))
            yield from _joining_variants((*more, *fixes))


def _native_call_rules(shape: UnitShape) -> Iterator[AdaptationRule]:
    rules = []
    fixes = _applicable_fixes(shape)
    sizes = sorted({0, 1, 2, 3, len(fixes)})
    for size in sizes:
        for chosen in combinations(fixes, size):
            if not _are_contradictory(chosen):
                cost = sum(_FIX_COSTS.get(fix, 1) for fix in chosen)
                rules.append((cost, AdaptationRule(chosen)))
                rules += [(cost + place + 1, rule) for place, rule in enumerate(_joining_variants(chosen))]
    rules.sort(key=lambda each: each[0])
    for _, rule in rules[:_MAX_NATIVE_RULES]:
        yield rule


def _applicable_fixes(shape: UnitShape) -> tuple[Fix, ...]:
    fixes: list[Fix] = []
    if shape.is_legacy:
        fixes.append("modern")
    if shape.ids != "short":
        fixes += ["ids", "named_ids"]
    if shape.arguments != "object":
        fixes.append("arguments")
    if shape.results in ("reordered", "mixed"):
        fixes.append("order")
    if shape.num_calls and shape.results in ("none", "partial", "unmatched"):
        fixes.append("result")
    if shape.num_calls and (shape.content != "empty" or shape.arguments != "object"):
        fixes += ["thought", "apart"] if shape.has_reasoning else ["apart"]
    if shape.num_calls > 1:
        fixes.append("split")
    if shape.result_content == "parts":
        fixes.append("images")
    return tuple(fixes)


def _are_contradictory(fixes: tuple[Fix, ...]) -> bool:
    return {"thought", "apart"} <= set(fixes) or {"ids", "named_ids"} <= set(fixes)


def opposite_role(role: str) -> Literal["user", "assistant"]:
    return "user" if role == "assistant" else "assistant"
