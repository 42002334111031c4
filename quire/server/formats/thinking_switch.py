"""The template variable that turns thinking on or off, found by rendering a question with both values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.conversation.chat_template import ChatRenderer

SWITCH_VARIABLES: tuple[tuple[str, Any, Any], ...] = (
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
    ("thinking_budget", -1, 0),
)
"""(variable, value with thinking, value without thinking), as in published templates."""
EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
EFFORT_WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts that the APIs accept, in ascending order."""
OFF_WORDS = ("no_think", "none", "off", "disabled")
SWITCH_ALIASES = ("enable_thinking", "thinking")
"""Names that clients use."""


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    on_variables: Mapping[str, Any] = field(default_factory=dict)
    """Empty if the model thinks by default."""
    off_variables: Mapping[str, Any] = field(default_factory=dict)
    """Empty if the model does not think by default, or if thinking cannot be turned off."""
    effort_words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Maps each effort variable and API word to the template's word."""
    is_switchable: bool = False

    @classmethod
    def from_template(cls, renderer: ChatRenderer, template: str) -> ThinkingSwitch:
        switch = cls._find_switch(renderer, template)
        efforts = {
            name: _accepted_word_by_effort(renderer, name, switch)
            for name in EFFORT_VARIABLES
            if _has_variable(template, name)
        }
        return replace(switch, effort_words=efforts)

    @classmethod
    def _find_switch(cls, renderer: ChatRenderer, template: str) -> ThinkingSwitch:
        words = [
            (name, "high", off) for name in EFFORT_VARIABLES for off in OFF_WORDS if _has_quoted_word(template, off)
        ]
        for name, on, off in (*SWITCH_VARIABLES, *words):
            if not _has_variable(template, name):
                continue
            default, thinks, not_ = (_try_render(renderer, one) for one in ({}, {name: on}, {name: off}))
            if None in (thinks, not_) or thinks == not_:
                continue
            if name in EFFORT_VARIABLES:  # this variable replaces the request's effort
                return cls({} if default != not_ else {name: on}, {name: off}, is_switchable=True)
            return cls(
                {} if default == thinks else {name: on}, {} if default == not_ else {name: off}, is_switchable=True
            )
        return NO_SWITCH

    def thinking_variables(self, thinks: bool, effort: str | None = None) -> dict[str, Any]:
        """If `effort` is given, an effort variable is omitted."""
        if not thinks:
            return dict(self.off_variables)
        return {
            name: value for name, value in self.on_variables.items() if effort is None or name not in self.effort_words
        }

    def request_variables(
        self, effort: str | None, template_kwargs: Mapping[str, Any], template: str
    ) -> dict[str, Any]:
        """Effort "none" turns thinking off, others turn it on. A boolean alias in `template_kwargs` overrides this,
        unless the template has that variable.
        """
        wanted = None if effort is None else effort != "none"
        for name in SWITCH_ALIASES:
            if isinstance(template_kwargs.get(name), bool) and not _has_variable(template, name):
                wanted = template_kwargs[name]
        switch_values = {} if wanted is None else self.thinking_variables(wanted, effort)
        if effort is None:
            return switch_values
        return {**{name: words[effort] for name, words in self.effort_words.items()}, **switch_values}


NO_SWITCH = ThinkingSwitch()


def _accepted_word_by_effort(renderer: ChatRenderer, name: str, switch: ThinkingSwitch) -> dict[str, str]:
    accepted = [
        word
        for word in EFFORT_WORDS
        if _try_render(renderer, {**(switch.off_variables if word == "none" else switch.on_variables), name: word})
        is not None
    ]
    places = {word: place for place, word in enumerate(EFFORT_WORDS)}

    def nearest_accepted(word: str) -> str:
        return min(accepted, key=lambda one: (abs(places[one] - places[word]), -places[one]), default=word)

    return {word: nearest_accepted(word) for word in EFFORT_WORDS}


def _has_variable(template: str, name: str) -> bool:
    return re.search(rf"(?<![\w.'\"]){name}(?!\w)", template) is not None


def _has_quoted_word(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


def _try_render(renderer: ChatRenderer, variables: dict[str, Any]) -> str | None:
    try:
        return renderer.render([{"role": "user", "content": "q"}], variables=variables)
    except InvalidRequest:
        return None
