"""The variable that tells a chat template whether the model thinks, found out by rendering a question both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.text.chat_template import ChatRenderer

VARIABLES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("open_thinking", True, False),
    ("enable_reasoning", True, False),
    ("reasoning", True, False),
    ("skip_thinking", False, True),
    ("thinking_mode", "thinking", "chat"),
    ("thinking_mode", "on", "off"),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
    ("reasoning_mode", "on", "off"),
)
"""Names that published templates give it, with the values for thinking and for none."""
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
"""Names that they give to how much a model thinks."""
ALIASES = ("enable_thinking", "thinking")
"""Names under which clients switch thinking, whichever the template has."""


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    on: Mapping[str, Any] = field(default_factory=dict)
    """Variables with which the model thinks; empty where it does so by itself."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """The same with which it does not; empty where it does not by itself, and where nothing switches it."""
    efforts: tuple[str, ...] = ()
    """Names of variables that say how much it thinks."""
    works: bool = False
    """Whether there is a variable that switches it."""

    @classmethod
    def of(cls, renderer: ChatRenderer, template: str) -> ThinkingSwitch:
        efforts = tuple(name for name in EFFORTS if _has(template, name))
        for name, on, off in VARIABLES:
            if not _has(template, name):
                continue
            default, thinks, not_ = (_rendered(renderer, one) for one in ({}, {name: on}, {name: off}))
            if None not in (thinks, not_) and thinks != not_:
                return cls(
                    {} if default == thinks else {name: on}, {} if default == not_ else {name: off}, efforts, True
                )
        return cls(efforts=efforts)

    def variables(self, effort: str | None, given: Mapping[str, Any], template: str) -> dict[str, Any]:
        """The variables for an effort, "none" for no thinking, or for a client's own name of the switch."""
        wanted = None if effort is None else effort != "none"
        for name in ALIASES:
            if isinstance(given.get(name), bool) and not _has(template, name):
                wanted = given[name]
        found = {} if wanted is None else dict(self.on if wanted else self.off)
        return found if effort is None else {**found, **dict.fromkeys(self.efforts, effort)}


NO_SWITCH = ThinkingSwitch()


def _has(template: str, name: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){name}(?!\w)", template) is not None


def _rendered(renderer: ChatRenderer, variables: dict[str, Any]) -> str | None:
    try:
        return renderer.render([{"role": "user", "content": "q"}], variables=variables)
    except InvalidRequest:
        return None
