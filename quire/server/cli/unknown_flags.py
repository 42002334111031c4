from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from quire.engine import unsupported_options
from quire.engine.common.speculative_keys import ignored_speculative_keys_reason

_SWITCH_ON, _SWITCH_OFF = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_PLUGIN_FLAGS = {
    "--reasoning-parser-plugin": "--reasoning-parser",
    "--tool-parser-plugin": "--tool-call-parser",
    "--tool-call-parser-plugin": "--tool-call-parser",
}
"""Maps vLLM's flags that load a user's parser to the flags that then name this parser. Quire does not know such names.
"""
_LOCAL_ENGINES_FLAGS = "--data-parallel-size-local", "-dpl"
_ONE_ENGINE_FLAGS = "--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe"
JSON_METAVAR = "JSON"
"""Metavar of flags whose value is a JSON object, which may come in parts: `--flag.key.key value`."""


def replace_underscores_in_flags(argv: Sequence[str]) -> list[str]:
    """Keys after a dot do not change."""
    arguments = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        name, dot, keys = flag.partition(".")
        arguments.append((name.replace("_", "-") + dot + keys if flag.startswith("--") else flag) + equals + value)
    return arguments


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Drops flags without effect and prints why. Flags may stand between positional arguments. Exits with status 2 for
    unknown flags.
    """
    known = parser._option_string_actions
    split = list(argv).index("--") if "--" in argv else len(argv)
    arguments = [_translate_flag(each, known) for each in replace_underscores_in_flags(argv[:split])]
    arguments = _drop_redundant_flags(
        parser, _translate_local_data_parallel_flags(known, _normalize_switches(known, arguments))
    )
    ordered = _put_flags_first(known, _merge_object_flags(parser, arguments), argv[split + 1 :])
    args, unknown = parser.parse_known_args(ordered)
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_flags_message(unknown, known)}")
    return args


def _put_flags_first(
    known: Mapping[str, argparse.Action], arguments: Sequence[str], positionals: Sequence[str]
) -> list[str]:
    """argparse refuses flags between positional arguments. `positionals` are those after `--`."""
    rest = list(arguments)
    flags: list[str] = []
    others: list[str] = []
    while rest:
        argument = rest.pop(0)
        if not _is_flag(argument, known):
            others.append(argument)
            continue
        flags.append(argument)
        for _ in range(_max_values(known.get(argument), len(rest))):
            if _is_flag(rest[0], known):
                break
            flags.append(rest.pop(0))
    others += positionals
    return [*flags, "--", *others] if others else flags


def _is_flag(argument: str, known: Container[str]) -> bool:
    """Tells flags from negative numbers and texts like argparse."""
    if argument in known or argument.partition("=")[0] in known:
        return True
    is_text = " " in argument or re.fullmatch(r"-|-\d+|-\d*\.\d+", argument) is not None
    return argument.startswith("-") and not is_text


def _max_values(action: argparse.Action | None, limit: int) -> int:
    if action is None:
        return 0
    if action.nargs in (None, "?"):
        return min(1, limit)
    return min(action.nargs, limit) if isinstance(action.nargs, int) else limit


def _translate_flag(argument: str, known: Container[str]) -> str:
    flag, equals, value = argument.partition("=")
    flag, dot, keys = flag.partition(".")
    if not flag.startswith("-") or flag in known:
        return argument
    ours = f"--{unsupported_options.flag_aliases().get(flag.lstrip('-'))}"
    return ours + dot + keys + equals + value if ours in known else argument


def _normalize_switches(known: Mapping[str, argparse.Action], argv: Sequence[str]) -> list[str]:
    """Turns `--flag=true` and the like into `--flag` or `--no-flag`."""
    rest, arguments = list(argv), []
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or not _is_switch(flag, known):
            arguments.append(argument)
            continue
        if not equals and rest and rest[0] in ("True", "False", "true", "false"):
            value = rest.pop(0)
        is_off = value.lower() in _SWITCH_OFF
        if value and not is_off and value.lower() not in _SWITCH_ON:
            arguments.append(argument)
        elif not is_off:
            arguments.append(flag)
        elif flag.startswith("--no-"):
            arguments.append(flag.replace("--no-", "--", 1))
        elif flag.replace("--", "--no-", 1) in known or flag not in known:
            arguments.append(flag.replace("--", "--no-", 1))
    return arguments


def _is_switch(flag: str, known: Mapping[str, argparse.Action]) -> bool:
    if flag in known:
        return known[flag].nargs == 0
    foreign = unsupported_options.find_foreign_flag(flag.lstrip("-"))
    return foreign is not None and not foreign.value_kind


def _translate_local_data_parallel_flags(known: Container[str], argv: Sequence[str]) -> list[str]:
    """Turns vLLM's flags for the number of local engines into --data-parallel-size, because each machine serves only
    its own engines.
    """
    if "--data-parallel-size" not in known:
        return list(argv)
    positionals: list[str] = []
    arguments = []
    engines = None
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        if flag in _LOCAL_ENGINES_FLAGS:
            engines = value if equals or not rest else rest.pop(0)
            positionals += _pop_leading_positionals(rest)
            continue
        if flag in _ONE_ENGINE_FLAGS:
            engines = "1"
        arguments.append(argument)
    return (
        [*positionals, *arguments] if engines is None else [*positionals, *arguments, f"--data-parallel-size={engines}"]
    )


def _pop_leading_positionals(rest: list[str]) -> list[str]:
    """An earlier flag that takes a list would also take the positional arguments after a dropped flag."""
    positionals = []
    while rest and not rest[0].startswith("-"):
        positionals.append(rest.pop(0))
    return positionals


def _merge_object_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Merges the parts `--flag.key.key value` of a flag into one JSON object at the first part's position."""
    known, rest = parser._option_string_actions, list(argv)
    arguments: list[str] = []
    places: dict[str, int] = {}
    whole: dict[str, list[str]] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        name, dot, keys = flag.partition(".")
        if not argument.startswith("-") or name not in known or known[name].metavar != JSON_METAVAR:
            arguments.append(argument)
            continue
        if name not in places:
            places[name] = len(arguments)
            arguments.append("")
        if not equals:
            value = rest.pop(0) if rest else ""
        if dot:
            parts.setdefault(name, []).append((keys, value))
        else:
            whole.setdefault(name, []).append(value)
    for name, place in places.items():
        values = whole.get(name, [])
        text = json.dumps(_merge_object(parser, name, values, parts[name])) if name in parts else values[-1]
        arguments[place] = f"{name}={text}"
    return arguments


def _merge_object(
    parser: argparse.ArgumentParser, name: str, values: Sequence[str], parts: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    merged = _parse_json_or_text(values[-1]) if values else {}
    if not isinstance(merged, dict):
        parser.error(
            f"argument {name}: {values[-1]!r} is not a JSON object that {name}.{parts[0][0]} could be a part of"
        )
    for keys, text in parts:
        inner = merged
        *path, last = keys.split(".")
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                parser.error(f"argument {name}: {key} is not an object, which {name}.{keys} could be a part of")
        if last.endswith("+"):
            inner.setdefault(last[:-1], []).extend(_parse_json_or_text(each) for each in text.split(","))
        else:
            inner[last] = _parse_json_or_text(text)
    return merged


def _parse_json_or_text(text: str) -> Any:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _drop_redundant_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    known, rest = parser._option_string_actions, list(argv)
    positionals: list[str] = []
    arguments: list[str] = []
    reasons_by_flag: dict[str, str] = {}
    named = {_PLUGIN_FLAGS[flag] for flag in (each.partition("=")[0] for each in argv) if flag in _PLUGIN_FLAGS}
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        value = value if equals else (rest or [""])[0]
        if why := unsupported_options.redundant_vllm_value_reason(flag.lstrip("-"), value) or _PARSER_PLUGIN_REASON * (
            flag in named
        ):
            reasons_by_flag[flag] = why
            del rest[: not equals]
            positionals += _pop_leading_positionals(rest)
            continue
        if flag == "--speculative-config" and (why := ignored_speculative_keys_reason(value)):
            reasons_by_flag[flag] = why
        if not flag.startswith("-") or flag.partition(".")[0] in known or flag == "--":
            arguments.append(argument)
            continue
        level = re.fullmatch(r"-O\d", flag)  # -O3, and also --compilation-config.mode 3
        foreign = unsupported_options.find_foreign_flag("O" if level else flag.lstrip("-").partition(".")[0])
        values = [value] if equals else []
        if foreign is not None and not equals and not level:
            values = _pop_flag_values(rest, foreign.value_kind)
        if foreign is not None and (why := foreign.redundancy_reason(" ".join(values))):
            reasons_by_flag[flag] = why
            positionals += _pop_leading_positionals(rest)
        else:
            arguments.append(flag if foreign else argument)
    if reasons_by_flag:
        print(f"{parser.prog}: {unsupported_options.summarize_redundant(reasons_by_flag)}", file=sys.stderr)
    return [*positionals, *arguments]


_PARSER_PLUGIN_REASON = "a parser of a plugin's: how the model writes is read from its chat template"


def _pop_flag_values(rest: list[str], value_kind: str) -> list[str]:
    values: list[str] = []
    while value_kind and rest and not rest[0].startswith("--") and (value_kind == "+" or not values):
        values.append(rest.pop(0))
    return values


def unknown_flags_message(unknown: Sequence[str], known: Iterable[str]) -> str:
    flags, names = [each.partition("=")[0] for each in unknown if each.startswith("-")], list(known)
    lines = [
        f"  {flag}: {unsupported_options.suggest_flag(flag, names) or 'not known; see --help'}\n"
        for flag in dict.fromkeys(flags)
    ]
    return "cannot be understood:\n" + ("".join(lines) or f"  {' '.join(unknown)}: one argument too many\n")
