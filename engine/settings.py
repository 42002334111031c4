"""Reads settings: what was given, QUIRE_* environment variables and a TOML file, over a model's defaults."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from quire.engine.errors import ConfigError

PREFIX = "QUIRE_"
PRESETS = Path(__file__).resolve().parent.parent / "configs"

Settings = TypeVar("Settings", bound=BaseModel)


def load(
    model: type[Settings], given: Mapping[str, Any], config: str | None = None, *, origin: str = "flag --{dashed}"
) -> Settings:
    """The settings: `given` before QUIRE_* variables before the TOML file `config` before defaults.

    `origin` says where given values came from. Raises ConfigError in one line that names each bad value's key and where
    it came from.
    """
    sources = [
        (origin, dict(given)),
        (f"environment variable {PREFIX}{{upper}}", _environment(model)),
        (f"file {config}", _read_toml(config) if config else {}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for text, source in reversed(sources):
        values |= source
        origins |= {key: text.format(key=key, dashed=key.replace("_", "-"), upper=key.upper()) for key in source}
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(dict(item), origins) for item in error.errors())) from None


def presets() -> list[str]:
    """Names of the TOML files that come with Quire."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def is_list(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) in (list, tuple) for kind in kinds)


def split(text: str) -> Sequence[str]:
    """A list written as JSON or with commas."""
    if text.lstrip().startswith("["):
        try:
            parsed: list[str] = json.loads(text)
            return parsed
        except json.JSONDecodeError:
            pass
    return [part.strip() for part in text.split(",") if part.strip()]


def _describe(error: dict[str, Any], origins: Mapping[str, str]) -> str:
    key = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"{key}: no such setting ({origins.get(key, 'unknown source')})"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, got {error['input']!r} ({origins.get(key, 'default')})"


def _environment(model: type[BaseModel]) -> dict[str, Any]:
    """The fields that QUIRE_* variables set, as text; lists as JSON or with commas."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        text = os.environ.get(PREFIX + name.upper())
        if text is not None:
            found[name] = split(text) if is_list(field) else text
    return found


def _read_toml(config: str) -> dict[str, Any]:
    """A TOML file by path, or a preset by name. Keys may be written with dashes."""
    path = PRESETS / f"{config}.toml" if config in presets() and not Path(config).exists() else Path(config)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {config}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {config} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}
