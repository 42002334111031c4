"""Writes the generated tables of docs/reference: `python -m tests.reference_docs`; a test compares them.

cli.md has the commands and their flags, settings.md the settings of `quire serve`, http-api.md the routes. Each table
is between two comments; the text around them is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.server.cli.main import COMMANDS
from quire.server.cli.main import main as run_command
from quire.server.config import ServerConfig
from tests.tree import ROOT

FOLDER = ROOT / "docs" / "reference"
_BENCHMARKS = ("serve", "offline", "start", "throughput", "latency")
_PART = "<!-- generated: {name} -->\n{text}<!-- end -->\n"


@dataclass(frozen=True)
class GeneratedPart:
    page: str
    name: str
    text: str

    def put_into(self, page: str) -> str:
        """The page with its old part replaced by this one."""
        part = _PART.format(name=self.name, text=self.text)
        found = re.search(rf"<!-- generated: {self.name} -->\n.*?<!-- end -->\n", page, re.DOTALL)
        assert found is not None, f"{self.page} has no place for {self.name}"
        return page.replace(found[0], part)


def generated_parts() -> list[GeneratedPart]:
    return [
        GeneratedPart("cli.md", "commands", _commands()),
        GeneratedPart("settings.md", "engine", _settings(EngineConfig, ())),
        GeneratedPart("settings.md", "server", _settings(ServerConfig, EngineConfig.model_fields)),
    ]


class _ParserFound(Exception):
    pass


def command_lines() -> list[list[str]]:
    """All commands, with the subcommands of `quire bench`."""
    return [
        line for name in COMMANDS for line in ([[name, each] for each in _BENCHMARKS] if name == "bench" else [[name]])
    ]


def find_parser(command: list[str]) -> argparse.ArgumentParser:
    """The parser of a command, found by running --help without output."""
    found: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, file: object = None) -> None:
        found.append(parser)
        raise _ParserFound

    with mock.patch.object(argparse.ArgumentParser, "print_help", keep):
        try:
            run_command([*command, "--help"])
        except _ParserFound:
            return found[0]
    raise AssertionError(command)


def _commands() -> str:
    parts = []
    for name, text in COMMANDS.items():
        parts.append(f"\n## quire {name}\n\n{text[0].upper()}{text[1:]}.\n")
        for command in (line for line in command_lines() if line[0] == name):
            if name == "bench":
                parts.append(f"\n### quire {' '.join(command)}\n")
            parts.append(_flags_of_command(find_parser(command)))
    return "".join(parts)


def _flags_of_command(parser: argparse.ArgumentParser) -> str:
    usage = " ".join((parser.usage or "").replace("usage: ", "").split())
    usage = re.sub(r" (?=quire )", "\n", usage % {"prog": parser.prog})
    rows, has_settings = [], False
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or "-h" in action.option_strings:
            continue
        if _is_setting(action) or action.dest == "config":  # settings.md explains --config
            has_settings = True
            continue
        shown = formatter._expand_help(action) if action.help else ""
        rows.append(f"| {_flag(action)} | {shown.replace('|', chr(92) + '|')} |\n")
    block = f"\n```text\n{usage}\n```\n" if usage else ""
    table = "".join(["\n| argument | |\n|---|---|\n", *rows]) if rows else ""
    which = "all [settings](settings.md)" if parser.prog == "quire serve" else "[settings](settings.md)"
    link = f"\nFurther flags: {which}.\n" if has_settings else ""
    return block + table + link


def _is_setting(action: argparse.Action) -> bool:
    field = ServerConfig.model_fields.get(action.dest)
    return field is not None and (action.help or "").startswith(field.description or "-")


def _flag(action: argparse.Action) -> str:
    value = action.metavar or ""
    if not value and action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    value = value[0] if isinstance(value, tuple) else value
    value = value.replace("|", "\\|")
    if not action.option_strings:
        return f"`{value}`"
    *others, last = action.option_strings
    last = f"{last} {value}" if value and action.nargs != 0 else last
    return ", ".join(f"`{each}`" for each in [*others, last])


def _settings(model: type[BaseModel], without: Any) -> str:
    rows = [_setting(name, field) for name, field in model.model_fields.items() if name not in without]
    return "".join(["\n| flag | value | default | |\n|---|---|---|---|\n", *rows, "\n"])


def _setting(name: str, field: FieldInfo) -> str:
    text = (field.description or "").replace("|", "\\|")
    return f"| `--{name.replace('_', '-')}` | {_value(field)} | {_default(field)} | {text} |\n"


def _value(field: FieldInfo) -> str:
    kinds = list(dict.fromkeys(_kinds(field.annotation)))
    bounds = [text for each in field.metadata for text in _bounds(each)]
    return ", ".join([" \\| ".join(kinds), *bounds])


def _kinds(annotation: Any) -> Iterator[str]:
    """Kinds of values in words; None is the value of an unset setting."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    elif origin is Literal:
        for each in get_args(annotation):
            yield from _kinds(each) if get_origin(each) else [f"`{each}`"]
    elif origin is list:
        yield f"list of {next(_kinds(get_args(annotation)[0]))}s"
    elif origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        yield "JSON"
    elif annotation is not type(None):
        yield {"bool": "switch", "int": "integer", "float": "number", "str": "text", "Path": "path"}.get(
            getattr(annotation, "__name__", ""), "text"
        )


def _bounds(constraint: Any) -> Iterator[str]:
    for attribute, words in (("ge", "{:g} or more"), ("gt", "above {:g}"), ("le", "at most {:g}")):
        if (bound := getattr(constraint, attribute, None)) is not None:
            yield words.format(bound).replace("86400", "86,400")
    if (factor := getattr(constraint, "multiple_of", None)) is not None:
        yield f"a multiple of {factor}"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if field.default_factory else field.default
    if default is PydanticUndefined or default in (None, "", [], {}):
        return ""
    if default == DEMO_MODEL:
        return "the embedded model"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list):
        return ", ".join(f"`{each}`" for each in default)
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def main() -> None:
    for part in generated_parts():
        path = FOLDER / part.page
        path.write_text(part.put_into(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
