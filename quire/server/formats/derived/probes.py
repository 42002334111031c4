"""Renders made-up turns of an assistant, and cuts out of each rendering what the model writes in its turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.errors import QuireError
from quire.engine.text.chat_template import ChatRenderer
from quire.server.formats.forms.slots import ID, common_prefix, common_suffix

USER = "quserq"
CONTENT, THOUGHT = "qcontentq", "qthoughtq"
NAMES = ("qfirstq", "qsecondq")
KEYS = ("qkeyoneq", "qkeyaq")
"""In another order than the alphabet's."""
VALUES = ("qvaloneq", "qvaltwoq")
SHORT_IDS = ("qidaaaaa1", "qidaaaaa2")
"""Mistral's templates refuse ids that are not nine letters and digits."""
LONG_IDS = ("call_qidaaaaaaaaaaaaaaa1", "call_qidaaaaaaaaaaaaaaa2")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "d"} for key in KEYS},
                "required": [KEYS[0]],
            },
        },
    }
    for name in NAMES
]


class NotDerived(Exception):
    """Says why a template's form cannot be found out."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class Prober:
    """Renders turns with one template."""

    renderer: ChatRenderer
    tools: Sequence[dict[str, Any]] | None = field(default_factory=lambda: TOOLS)
    ids: tuple[str, ...] = SHORT_IDS
    named_ids: bool = False
    """Calls have ids like functions.name:0."""
    before: str = ""
    """The prompt without what begins the answer."""
    lead: str = ""
    """What the prompt ends with when an answer is asked for."""

    def begin(self) -> None:
        """Render the prompt. Raises NotDerived."""
        user = {"role": "user", "content": USER}
        self.before = self._render([user], False)
        prompt = self._render([user], True)
        self.lead = prompt[len(common_prefix(self.before, prompt)) :]

    def turn(self, calls: Sequence[Call] = (), *, content: str = "", thought: str | None = None) -> str:
        """An assistant's turn as the template writes it, with what the prompt may have begun of it.

        Ids in it are replaced by the character ID. Raises NotDerived.
        """
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thought is not None:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [self._call(call, index) for index, call in enumerate(calls)]
        whole = self._render([{"role": "user", "content": USER}, message], False)
        if USER not in whole or USER not in self.before:
            raise NotDerived("it does not show the user's message")
        start = common_prefix(self.before, whole)
        rest, after = whole[len(start) :], self.before[len(start) :]
        rest = rest.removesuffix(common_suffix(rest, after))
        for one in self.ids:
            rest = rest.replace(one, ID)
        return rest

    def _call(self, call: Call, index: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": dict(call.arguments)}
        id = f"functions.{call.name}:{index}" if self.named_ids else self.ids[index % 2]
        return {"id": id, "type": "function", "function": function}

    def _render(self, messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            return self.renderer.write(messages, tools=self.tools, add_generation_prompt=prompt)
        except QuireError as error:
            raise NotDerived(error.message) from error


def parsed(text: str) -> Any:
    """The value of a JSON text; None for any other text."""
    try:
        return json.loads(text)
    except ValueError:
        return None
