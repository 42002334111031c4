"""What to write instead of a setting that is not there, for users who mistype one or bring vLLM's or llama.cpp's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

_TELLING = 3
"""Letters of an abbreviation that may tell what is meant."""
_AS_IT_IS = "so it is anyway"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A flag of another server's that Quire does not have."""

    text: str
    """Why it changes nothing, or what to do instead."""
    harmless: bool
    """Whether it changes nothing, whatever its value."""
    takes: str
    """The values that follow it: "" none, "=" one, "+" any number."""
    usual: tuple[str, ...] = ()
    """Values with which it asks for what is done anyway."""

    def needless(self, value: str) -> str:
        """Why it changes nothing with this value; "" where it would."""
        return self.text if self.harmless else _AS_IT_IS if value in self.usual else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or "" where no known name is near, nor just one begins with it."""
    names = list(known)
    longer = [each for each in names if each.startswith(name)] if len(name.strip("-")) >= _TELLING else []
    near = get_close_matches(name, names, 1, 0.75) or (longer if len(longer) == 1 else [])
    return f"did you mean {near[0]}?" if near else ""


@cache
def foreign_flags() -> Mapping[str, Foreign]:
    """By the flag without its dashes."""
    read = _read()
    return {**_section(read["without_effect"], True), **_section(read["instead"], False)}


@cache
def _server_s() -> Mapping[str, Foreign]:
    """Flags of `quire serve` that are no options of `LLM`."""
    read = _read()["programs"]
    return {**_section(read["without_effect"], True), **_section(read["instead"], False)}


def needless_value(name: str, value: object) -> str:
    """Why a value of vLLM's for a flag of ours changes nothing; "" for all other values. `name`: without dashes."""
    found = _section(_read()["usual"], False).get(name.replace("_", "-"))
    return found.text if found is not None and str(value) in found.usual else ""


def is_server_s(name: str) -> bool:
    """Whether it is a setting of the server's, and vLLM's `LLM` takes it too."""
    return name.replace("_", "-") in _server_s()


@cache
def other_names() -> Mapping[str, str]:
    """Our flag for another server's of the same meaning, both without dashes."""
    return {theirs: ours for ours, names in _read()["same"].items() for theirs in names.split()}


def foreign_flag(name: str) -> Foreign | None:
    """Of a flag without its dashes: `no-X` asks for what is done anyway where there is no X, unless the table says
    otherwise."""
    table = foreign_flags()
    if name in table:
        return table[name]
    positive = table.get(name.removeprefix("no-")) if name.startswith("no-") else None
    if positive is None or positive.takes:
        return None
    return positive if positive.harmless else Foreign(_AS_IT_IS, True, "")


def needless_option(name: str, value: object) -> str:
    """Why an option of vLLM's `LLM` changes nothing; "" where Quire has it, would have to do something, or does not
    know it. None asks for nothing, and False for what `--no-…` does."""
    flag = name.replace("_", "-")
    found = _server_s().get(flag) or (foreign_flag(f"no-{flag}") if value is False else None) or foreign_flag(flag)
    if found is None:
        return ""
    return _AS_IT_IS if value is None else found.needless("" if value is False else str(value))


def summed_up(needless: Mapping[str, str]) -> str:
    """One line about flags that change nothing, by their names; each reason is said once."""
    reasons = dict.fromkeys(needless.values())
    return "changes nothing: " + "; ".join(
        f"{', '.join(flag for flag, why in needless.items() if why == reason)} ({reason})" for reason in reasons
    )


def _section(section: Mapping[str, str], harmless: bool) -> dict[str, Foreign]:
    found = {}
    for text, flags in section.items():
        for flag in flags.split():
            name, takes, usual = re.fullmatch(r"([\w-]+)([=+]?)(.*)", flag).groups()  # type: ignore[union-attr]
            found[name] = Foreign(text, harmless, takes, tuple(usual.split(",")) if usual else ())
    return found


@cache
def _read() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def on_flag(flag: str, known: Iterable[str]) -> str:
    """What to do instead of `flag`; "" where nothing is known of it. `known`: flags that are there, with dashes."""
    found = foreign_flag(flag.lstrip("-").partition(".")[0])
    return found.text if found else nearest(flag, known)


def on_setting(name: str, known: Iterable[str]) -> str:
    """The same for a name as Python, TOML files and variables write it: `max_model_len`."""
    flag = name.replace("_", "-")
    found = _server_s().get(flag) or foreign_flag(flag)
    text = f"use --{other_names()[flag]}" if flag in other_names() else found.text if found else ""
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text) or nearest(name, known)
