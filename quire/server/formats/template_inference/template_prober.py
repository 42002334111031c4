"""Renders made-up assistant turns, and cuts out the model's part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.common.errors import QuireError
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.server.formats.call_forms.slots import ID_SLOT, common_prefix_by_atoms, common_suffix_by_atoms

USER_TEXT = "quserq"
CONTENT_TEXT, REASONING_TEXT = "qcontentq", "qthoughtq"
PROBE_NAMES = ("qfirstq", "qsecondq")
PROBE_KEYS = ("qkeyoneq", "qkeyaq")
"""Not in alphabetical order, so that a template that sorts keys is noticed."""
PROBE_VALUES = ("qvaloneq", "qvaltwoq")
SHORT_IDS = ("qidaaaaa1", "qidaaaaa2")
"""Mistral's templates refuse ids that are not nine letters and digits."""
LONG_IDS = ("call_qidaaaaaaaaaaaaaaa1", "call_qidaaaaaaaaaaaaaaa2")
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "d"} for key in PROBE_KEYS},
                "required": [PROBE_KEYS[0]],
            },
        },
    }
    for name in PROBE_NAMES
]


class TemplateInferenceError(Exception): ...


@dataclass(frozen=True, slots=True)
class ProbeCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class TemplateProber:
    renderer: ChatRenderer
    tools: Sequence[dict[str, Any]] | None = field(default_factory=lambda: PROBE_TOOLS)
    ids: tuple[str, ...] = SHORT_IDS
    named_ids: bool = False
    prompt_before: str = ""
    generation_prompt: str = ""

    def learn_generation_prompt(self) -> None:
        """Raises TemplateInferenceError."""
        user = {"role": "user", "content": USER_TEXT}
        self.prompt_before = self._render_probe([user], False)
        prompt = self._render_probe([user], True)
        self.generation_prompt = prompt[len(common_prefix_by_atoms(self.prompt_before, prompt)) :]

    def render_assistant_turn(
        self, calls: Sequence[ProbeCall] = (), *, content: str = "", reasoning: str | None = None
    ) -> str:
        """Returns the turn with ids replaced by ID_SLOT. Raises TemplateInferenceError."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._build_tool_call(call, index) for index, call in enumerate(calls)]
        whole = self._render_probe([{"role": "user", "content": USER_TEXT}, message], False)
        if USER_TEXT not in whole or USER_TEXT not in self.prompt_before:
            raise TemplateInferenceError("it does not render the user's message")
        start = common_prefix_by_atoms(self.prompt_before, whole)
        rest, after = whole[len(start) :], self.prompt_before[len(start) :]
        rest = rest.removesuffix(common_suffix_by_atoms(rest, after))
        for one in self.ids:
            rest = rest.replace(one, ID_SLOT)
        return rest

    def _build_tool_call(self, call: ProbeCall, index: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": dict(call.arguments)}
        id = f"functions.{call.name}:{index}" if self.named_ids else self.ids[index % 2]
        return {"id": id, "type": "function", "function": function}

    def _render_probe(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            return self.renderer.render_unadapted(messages, tools=self.tools, add_generation_prompt=prompt)
        except QuireError as error:
            raise TemplateInferenceError(error.message) from error


def parse_json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
