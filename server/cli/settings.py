"""Flags, environment variables and a TOML file, laid over a settings model's defaults.

The flags are made from the model's fields. pydantic-settings has a command line of its own; this one says in one line
which value is bad and where it came from.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from quire.engine.errors import ConfigError
from quire.server.cli.unknown_flags import dashed, unknown_arguments

PREFIX = "QUIRE_"
PRESETS = Path(__file__).resolve().parent.parent.parent / "configs"

Settings = TypeVar("Settings", bound=BaseSettings)


def add_flags(
    parser: argparse.ArgumentParser, model: type[BaseSettings], titles: Mapping[type[BaseSettings], str]
) -> None:
    """Add --config and one flag per field of `model`, under the title of the first class in `titles` that has it.

    Fields of none of these classes get no flag.
    """
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings, or a preset: {', '.join(_presets()) or 'none'}"
    )
    sections = {base: parser.add_argument_group(title) for base, title in titles.items()}
    for name, field in model.model_fields.items():
        section = next((group for base, group in sections.items() if name in base.model_fields), None)
        if section is not None:
            section.add_argument("--" + name.replace("_", "-"), **_form(field), help=_help(field))


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], model: type[Settings], positional: str | None = None
) -> tuple[argparse.Namespace, Settings]:
    """Parse `argv`: the arguments that are not fields of `model`, and the settings.

    `positional` names an argument for the field `model`. Exits with status 2 and one line for a bad value.
    """
    args, unknown = parser.parse_known_args(dashed(argv))
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_arguments(unknown, parser._option_string_actions)}")
    flags = {name: value for name, value in vars(args).items() if name in model.model_fields}
    for name, value in flags.items():
        if isinstance(value, list):  # vLLM's are JSON
            flags[name] = [part for text in value for part in (_split(text) if text.startswith("[") else [text])]
    given = getattr(args, positional) if positional else None
    if given is not None:
        if "model" in flags:
            parser.error("the model is given twice, as an argument and by --model")
        flags["model"] = given
    known = {PREFIX + name.upper() for name in model.model_fields}
    for name in sorted(set(os.environ) - known):
        if name.startswith(PREFIX):
            print(f"{parser.prog}: environment variable {name} is not a setting, ignored", file=sys.stderr)
    if os.environ.get("VLLM_API_KEY"):  # who set it thinks that the door is locked
        print(f"{parser.prog}: VLLM_API_KEY is not read; QUIRE_API_KEY is", file=sys.stderr)
    try:
        return args, load(model, flags, args.config)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def number(
    kind: Callable[[str], Any], low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], Any]:
    """An argparse type: a finite number from `low`, itself left out with `above`, up to `high`."""

    def read(text: str) -> Any:
        value = kind(text)
        if not (low < value if above else low <= value) or value > high or value == math.inf:
            most = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {low:g}{most}, got {text}")
        return value

    read.__name__ = kind.__name__  # argparse names it in its message
    return read


def _form(field: FieldInfo) -> dict[str, Any]:
    """How argparse takes a field: as text, for the model to judge; nothing at all when the flag is not given."""
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    form: dict[str, Any] = {"default": argparse.SUPPRESS}
    if bool in kinds:
        return form | {"action": argparse.BooleanOptionalAction}
    if _is_list(field):
        return form | {"nargs": "+", "action": "extend", "metavar": "TEXT"}
    choices = _choices(field.annotation)
    if choices:
        return form | {"metavar": "{" + ",".join(choices) + "}"}
    named = {int: "N", float: "NUMBER", Path: "PATH"}
    return form | {"metavar": next((named[kind] for kind in kinds if kind in named), "TEXT")}


def _is_list(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) in (list, tuple) for kind in kinds)


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True)
    if default not in (None, [], (), "") and "default" not in text:
        shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def _presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load(model: type[Settings], flags: Mapping[str, Any], config: str | None = None) -> Settings:
    """The settings: `flags` before QUIRE_* variables before the TOML file before defaults.

    Raises ConfigError in one line that names each bad value's key and where it came from.
    """
    sources = [
        ("flag --{dashed}", dict(flags)),
        ("environment variable QUIRE_{upper}", _environment(model)),
        (f"file {config}", _read_toml(config) if config else {}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, source in reversed(sources):
        values |= source
        origins |= {key: origin.format(dashed=key.replace("_", "-"), upper=key.upper()) for key in source}
    settings = model.__new__(model)
    try:
        BaseModel.__init__(settings, **values)  # BaseSettings' own would read the environment once more
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(dict(item), origins) for item in error.errors())) from None
    return settings


def _describe(error: dict[str, Any], origins: Mapping[str, str]) -> str:
    key = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"{key}: no such setting ({origins.get(key, 'unknown source')})"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, got {error['input']!r} ({origins.get(key, 'default')})"


def _environment(model: type[BaseSettings]) -> dict[str, Any]:
    """The fields that QUIRE_* variables set, as text; lists as JSON or with commas."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        text = os.environ.get(PREFIX + name.upper())
        if text is not None:
            found[name] = _split(text) if _is_list(field) else text
    return found


def _split(text: str) -> Sequence[str]:
    if text.lstrip().startswith("["):
        try:
            parsed: list[str] = json.loads(text)
            return parsed
        except json.JSONDecodeError:
            pass
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_toml(config: str) -> dict[str, Any]:
    """A TOML file by path, or a preset by name. Keys may be written with dashes."""
    path = PRESETS / f"{config}.toml" if config in _presets() and not Path(config).exists() else Path(config)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {config}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {config} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}
