"""Suggestions for unknown settings, which may be typos or flags of vLLM and llama.cpp."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

_MIN_PREFIX_LENGTH = 3
_ALREADY_DONE = "this is always so"


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    text: str
    is_harmless: bool
    value_kind: str
    """Values that the flag takes: "" none, "=" one, "+" any number."""
    default_values: tuple[str, ...] = ()

    def redundancy_reason(self, value: str) -> str:
        """Empty if the value would have an effect."""
        return self.text if self.is_harmless else _ALREADY_DONE if value in self.default_values else ""


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    longer = [each for each in names if each.startswith(name)] if len(name.strip("-")) >= _MIN_PREFIX_LENGTH else []
    near = get_close_matches(name, names, 1, 0.75) or (longer if len(longer) == 1 else [])
    return f"did you mean {near[0]}?" if near else ""


@cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    table = _read_table()
    return {**_parse_section(table["without_effect"], True), **_parse_section(table["instead"], False)}


@cache
def _server_only_flag_table() -> Mapping[str, ForeignFlag]:
    """Flags of `quire serve` that are options of vLLM's `LLM`, but not of Quire's."""
    table = _read_table()["programs"]
    return {**_parse_section(table["without_effect"], True), **_parse_section(table["instead"], False)}


def redundant_vllm_value_reason(name: str, value: object) -> str:
    """`name` has no leading dashes."""
    foreign = _parse_section(_read_table()["usual"], False).get(name.replace("_", "-"))
    return foreign.text if foreign is not None and str(value) in foreign.default_values else ""


def is_server_only(name: str) -> bool:
    return name.replace("_", "-") in _server_only_flag_table()


@cache
def flag_aliases() -> Mapping[str, str]:
    return {theirs: ours for ours, names in _read_table()["same"].items() for theirs in names.split()}


def find_foreign_flag(name: str) -> ForeignFlag | None:
    """If the table lists X as a flag without a value, and does not list `no-X`, then `no-X` is harmless."""
    table = foreign_flags()
    if name in table:
        return table[name]
    positive = table.get(name.removeprefix("no-")) if name.startswith("no-") else None
    if positive is None or positive.value_kind:
        return None
    return positive if positive.is_harmless else ForeignFlag(_ALREADY_DONE, True, "")


def redundant_option_reason(name: str, value: object) -> str:
    """Empty if Quire has the option, does not know it, or cannot do what the value asks for. The value None asks for
    nothing. False stands for `--no-…`.
    """
    flag = name.replace("_", "-")
    foreign = (
        _server_only_flag_table().get(flag)
        or (find_foreign_flag(f"no-{flag}") if value is False else None)
        or find_foreign_flag(flag)
    )
    if foreign is None:
        return ""
    return _ALREADY_DONE if value is None else foreign.redundancy_reason("" if value is False else str(value))


def summarize_redundant(reasons_by_flag: Mapping[str, str]) -> str:
    reasons = dict.fromkeys(reasons_by_flag.values())
    return "changes nothing: " + "; ".join(
        f"{', '.join(flag for flag, why in reasons_by_flag.items() if why == reason)} ({reason})" for reason in reasons
    )


def _parse_section(section: Mapping[str, str], is_harmless: bool) -> dict[str, ForeignFlag]:
    flags_by_name = {}
    for text, flags in section.items():
        for flag in flags.split():
            name, value_kind, default_values = re.fullmatch(r"([\w-]+)([=+]?)(.*)", flag).groups()  # type: ignore[union-attr]
            flags_by_name[name] = ForeignFlag(
                text, is_harmless, value_kind, tuple(default_values.split(",")) if default_values else ()
            )
    return flags_by_name


@cache
def _read_table() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def suggest_flag(flag: str, known: Iterable[str]) -> str:
    """The names in `known` begin with dashes."""
    foreign = find_foreign_flag(flag.lstrip("-").partition(".")[0])
    return foreign.text if foreign else suggest_nearest(flag, known)


def suggest_setting(name: str, known: Iterable[str]) -> str:
    """Like `suggest_flag`, but with names spelled as in Python, TOML and environment variables: `max_model_len`."""
    flag = name.replace("_", "-")
    foreign = _server_only_flag_table().get(flag) or find_foreign_flag(flag)
    text = f"use --{flag_aliases()[flag]}" if flag in flag_aliases() else foreign.text if foreign else ""
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text) or suggest_nearest(name, known)
