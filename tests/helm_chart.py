"""The Helm chart's objects: by Helm where it is installed, else by the few parts of Go's templates that it uses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from typing import Any

import yaml

from tests.tree import ROOT

CHART = ROOT / "deploy/helm"


def rendered(**values: Any) -> list[dict[str, Any]]:
    """The chart's objects: by `helm template` where it is installed, else by what is written below for the few actions
    and functions that the chart keeps to. Raises ChartError if the chart refuses the values."""
    given = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for name, each in values.items():
        given[name] = given[name] | each if isinstance(each, dict) and isinstance(given[name], dict) else each
    if helm := shutil.which("helm"):
        command = [helm, "template", "quire", str(CHART), "--namespace", "models", "--values", "-"]
        done = subprocess.run(command, input=yaml.safe_dump(given), capture_output=True, text=True)
        if done.returncode:
            raise ChartError(done.stderr)
        text = done.stdout
    else:
        context = {"Values": given, "Release": {"Name": "quire", "Namespace": "models"}}
        paths = sorted((CHART / "templates").glob("*.yaml"))
        text = "\n---\n".join(render(path.read_text(encoding="utf-8"), context) for path in paths)
    return [each for each in yaml.safe_load_all(text) if each]


def render(template: str, context: dict[str, Any]) -> str:
    """Go's templates, as far as the chart uses them: if, else if, else, end, and expressions (see `value`)."""
    parts = re.split(r"(\{\{-? .*? -?\}\})", template)
    written: list[str] = []
    open_ifs: list[tuple[bool, bool]] = []  # whether this branch is written, whether one has been
    for part in parts:
        if not part.startswith("{{"):
            written += [part] if all(now for now, _ in open_ifs) else []
            continue
        if part.startswith("{{-") and written:
            written[-1] = written[-1].rstrip()
        action = part.strip("{}-").strip()
        is_written = all(now for now, _ in open_ifs)
        if action.startswith("if "):
            now = is_written and bool(value(action[3:], context))
            open_ifs.append((now, now))
        elif action.startswith("else"):
            _, had = open_ifs.pop()
            outer = all(now for now, _ in open_ifs)
            now = outer and not had and (action == "else" or bool(value(action[8:], context)))
            open_ifs.append((now, had or now))
        elif action == "end":
            open_ifs.pop()
        elif is_written:
            written.append(str(value(action, context)))
    assert not open_ifs
    return "".join(written)


class ChartError(Exception):
    """Raised by `fail`, with its message."""


def fail(message: str) -> None:
    raise ChartError(message)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eq": lambda one, other: one == other,
    "ne": lambda one, other: one != other,
    "gt": lambda one, other: one > other,
    "not": lambda one: not one,
    "and": lambda *each: next((one for one in each if not one), each[-1]),
    "or": lambda *each: next((one for one in each if one), each[-1]),
    "int": int,
    "div": lambda one, other: one // other,
    "mod": lambda one, other: one % other,
    "quote": lambda one: json.dumps(str(one)),
    "trim": str.strip,
    "toJson": json.dumps,
    "toYaml": lambda one: yaml.safe_dump(one).rstrip("\n"),
    "fromYaml": yaml.safe_load,
    "nindent": lambda spaces, text: "\n" + textwrap.indent(text, " " * spaces),
    "list": lambda *each: [*each],
    "concat": lambda *each: [one for some in each for one in some],
    "dict": lambda *each: dict(zip(each[::2], each[1::2], strict=True)),
    ".Files.Get": lambda name: (CHART / name).read_text(encoding="utf-8"),
    "fail": fail,
}


def value(expression: str, context: dict[str, Any]) -> Any:
    """The value of a path, a literal, a function with arguments, or a pipeline of several."""
    words = re.findall(r'"[^"]*"|[()|]|[^\s()|]+', expression)
    found = pipeline(words, context)
    assert not words, words
    return found


def pipeline(words: list[str], context: dict[str, Any]) -> Any:
    """Evaluates words up to a closing parenthesis, and removes them from the front."""
    piped: list[Any] = []
    while True:
        name, arguments = words.pop(0), list[Any]()
        while words and words[0] not in ("|", ")"):
            arguments.append(operand(words, context))
        if name in FUNCTIONS:
            found = FUNCTIONS[name](*arguments, *piped)
        else:
            words.insert(0, name)
            found = operand(words, context)
        if not words or words[0] == ")":
            return found
        words.pop(0)
        piped = [found]


def operand(words: list[str], context: dict[str, Any]) -> Any:
    word = words.pop(0)
    if word == "(":
        found = pipeline(words, context)
        assert words.pop(0) == ")"
        return found
    if not word.startswith("."):
        return json.loads(word)
    found = context
    for name in word.removeprefix(".").split("."):
        found = found[name]
    return found
