from __future__ import annotations

import re
from dataclasses import dataclass

from quire.server.formats.call_forms.slots import TAG, TAG_GROUP, common_prefix_by_atoms, common_suffix_by_atoms
from quire.server.formats.template_inference.template_prober import (
    CONTENT_TEXT,
    PROBE_NAMES,
    REASONING_TEXT,
    ProbeCall,
    TemplateInferenceError,
    TemplateProber,
)


@dataclass(frozen=True, slots=True)
class AssistantTurnForm:
    generation_prompt: str
    content_begin: str = ""
    content_end: str = ""
    end: str = ""
    reasoning_begin: str = ""
    reasoning_end: str = ""
    reasoning_space: str = ""
    repeats_generation_prompt: bool = False
    content_only_turn: str = ""

    def extract_model_text(self, turn: str) -> str:
        if turn.startswith(self.generation_prompt):
            rest = turn[len(self.generation_prompt) :]
        else:
            shared = common_prefix_by_atoms(self.generation_prompt, turn)
            rest = turn[len(shared) :]
            if not self.reasoning_end:
                rest = rest[
                    len(
                        common_prefix_by_atoms(rest, self.content_only_turn[len(shared) :].partition(CONTENT_TEXT)[0])
                    ) :
                ]
        if self.reasoning_end:
            head, separator, after = rest.partition(self.reasoning_end)
            begin = self.reasoning_begin.strip()
            if separator and not head.replace(begin, "").strip():
                rest = after
        return rest.removeprefix(self.content_begin + self.content_end) if self.content_end else rest


def infer_turn_form(prober: TemplateProber) -> AssistantTurnForm:
    """Raises TemplateInferenceError if the template does not render content."""
    content_only_turn = prober.render_assistant_turn(content=CONTENT_TEXT)
    if CONTENT_TEXT not in content_only_turn:
        raise TemplateInferenceError("it does not render the content of an assistant's turn")
    begin, end, repeats = infer_reasoning_markers(prober, content_only_turn)
    form_without_content = AssistantTurnForm(
        prober.generation_prompt, reasoning_begin=begin.strip(), reasoning_end=end, content_only_turn=content_only_turn
    )
    before, _, after = form_without_content.extract_model_text(content_only_turn).partition(CONTENT_TEXT)
    frame = before if before.strip() and (content_only_turn.startswith(prober.generation_prompt) or end) else ""
    content_end = ""
    if frame:
        try:
            called = form_without_content.extract_model_text(
                prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {})])
            )
        except TemplateInferenceError:
            called = ""
        if called.startswith(frame):
            content_end = common_prefix_by_atoms(called[len(frame) :], after)
    stripped = begin.strip()
    space = begin[: len(begin) - len(begin.lstrip())]
    return AssistantTurnForm(
        prober.generation_prompt,
        frame,
        content_end,
        after[len(content_end) :],
        stripped,
        end,
        space,
        repeats_generation_prompt=repeats,
        content_only_turn=content_only_turn,
    )


def infer_reasoning_markers(prober: TemplateProber, content_only_turn: str) -> tuple[str, str, bool]:
    """Returns begin and end markers, and whether the generation prompt is repeated. Markers are empty if the template
    does not render reasoning.
    """
    for calls, content in (((), CONTENT_TEXT), ((ProbeCall(PROBE_NAMES[0], {}),), "")):
        try:
            turn = prober.render_assistant_turn(calls, content=content, reasoning=REASONING_TEXT)
            turn_without_reasoning = (
                prober.render_assistant_turn(calls, content=content) if calls else content_only_turn
            )
        except TemplateInferenceError:
            continue
        if REASONING_TEXT in turn:
            break
    else:
        return "", "", False
    before, _, after = turn.partition(REASONING_TEXT)
    rest = common_suffix_by_atoms(after, turn_without_reasoning)
    end = after[: len(after) - len(rest)].strip()
    if not end:
        match = re.match(rf"\s*({TAG_GROUP})", after.partition(CONTENT_TEXT)[0].partition(PROBE_NAMES[0])[0])
        end = match[1] if match is not None else ""
    begin = _infer_reasoning_begin(before, turn_without_reasoning, prober.generation_prompt, end)
    repeats = bool(prober.generation_prompt.strip()) and rest.lstrip().startswith(prober.generation_prompt.strip())
    return (begin, end, repeats) if begin and end else ("", "", False)


def _infer_reasoning_begin(before: str, turn_without_reasoning: str, lead: str, end: str) -> str:
    if before.startswith(lead):
        begin = before[len(lead) :].rstrip()
    else:
        begin = before[len(common_prefix_by_atoms(before, turn_without_reasoning)) :].strip()
        prompt_begin = lead[len(common_prefix_by_atoms(lead, before)) :].strip()
        if not begin and not prompt_begin.startswith(end):
            begin = prompt_begin
    if begin.strip():
        return begin
    tags = TAG.pattern if TAG.fullmatch(end) else TAG_GROUP
    match = re.search(rf"({tags})\s*$", before)
    return match[1] if match is not None else ""
