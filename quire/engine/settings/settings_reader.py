from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from quire.engine import unsupported_options
from quire.engine.common.config import PRESETS_FOLDER
from quire.engine.common.errors import ConfigError

ENV_PREFIX = "QUIRE_"
OTHER_ENV_VARIABLES = {"QUIRE_CPU_ISA", "QUIRE_LOG_FORMAT"}
"""Variables that other modules read. They look like misspellings of load_format and max_loras."""
_KUBERNETES_VARIABLE = re.compile(
    r"QUIRE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_PROTO|_PORT|_ADDR)?)|QUIRE_\w+_PORT"
)
"""Variables that Kubernetes sets for services whose name begins with quire, in addition to QUIRE_PORT."""
Settings = TypeVar("Settings", bound=BaseModel)


def load_settings(
    model: type[Settings],
    explicit: Mapping[str, Any],
    config: str | None = None,
    *,
    origin: str = "flag --{dashed}",
    other_settings: Collection[str] | None = None,
) -> Settings:
    """Precedence: `explicit`, QUIRE_* variables, the TOML file `config`, variables of PyTorch launchers, defaults.

    `origin` names an explicit value's source in errors. `other_settings`: further settings that variables may set; None
    allows any that do not resemble one of the model's. Raises ConfigError that names each bad value's key and source.
    """
    _check_environment_variables(model, other_settings)
    sources = [
        (origin, dict(explicit)),
        (f"environment variable {ENV_PREFIX}{{upper}}", _read_environment(model)),
        (f"file {config}", _read_toml(config) if config else {}),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for text, source in reversed(sources):
        values |= source
        origins |= {key: text.format(key=key, dashed=key.replace("_", "-"), upper=key.upper()) for key in source}
    for key, (variable, text) in _read_launcher_variables(values).items():
        values[key], origins[key] = text, f"environment variable {variable}"
    for key, value in values.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and not _has_no_surrogates(text):
                raise ConfigError(f"{key}: is not UTF-8 text, got {text!r} ({origins[key]})")
    try:
        return model(**values)
    except ValidationError as error:
        known = [*model.model_fields, *(other_settings or ())]
        raise ConfigError(
            "; ".join(_describe_validation_error(dict(item), origins, known) for item in error.errors())
        ) from None


def _check_environment_variables(model: type[BaseModel], other_settings: Collection[str] | None) -> None:
    known = {ENV_PREFIX + name.upper() for name in (*model.model_fields, *(other_settings or ()))}
    problems = []
    for name in sorted(name for name in os.environ if name.startswith(ENV_PREFIX)):
        if name in known or name in OTHER_ENV_VARIABLES or _KUBERNETES_VARIABLE.fullmatch(name):
            continue
        if other_settings is None and unsupported_options.is_server_only(name.removeprefix(ENV_PREFIX).lower()):
            continue
        suggestion = _suggest_variable(name, known)
        if suggestion or other_settings is not None:
            problems.append(f"environment variable {name}: no such setting{suggestion and f', {suggestion}'}")
    if problems:
        raise ConfigError("; ".join(problems))


def _suggest_variable(name: str, known: Collection[str]) -> str:
    text = unsupported_options.suggest_setting(
        name.removeprefix(ENV_PREFIX).lower(), [each.removeprefix(ENV_PREFIX).lower() for each in known]
    )
    return re.sub(r"(?<=^use )\w+$|(?<=^did you mean )\w+(?=\?$)", lambda part: ENV_PREFIX + part[0].upper(), text)


def _has_no_surrogates(text: str) -> bool:
    """False for an argument that is not UTF-8, because Python represents such bytes by surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml"))


def is_list_field(field: FieldInfo) -> bool:
    kinds = (field.annotation, *get_args(field.annotation))
    return any(get_origin(kind) in (list, tuple) for kind in kinds)


def parse_json_or_comma_list(text: str) -> Sequence[str]:
    if text.lstrip().startswith("["):
        try:
            parsed: list[str] = json.loads(text)
            return parsed
        except json.JSONDecodeError:
            pass
    return [part.strip() for part in text.split(",") if part.strip()]


def _describe_validation_error(error: dict[str, Any], origins: Mapping[str, str], known: Sequence[str]) -> str:
    key = ".".join(map(str, error["loc"]))
    origin = origins.get(str(error["loc"][0]), "default") if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        suggestion = unsupported_options.suggest_setting(key, known)
        return f"{key}: no such setting{suggestion and f', {suggestion}'} ({origin})"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, got {error['input']!r} ({origin})"


def _read_environment(model: type[BaseModel]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        text = os.environ.get(ENV_PREFIX + name.upper())
        if text is not None and not (name == "port" and text.startswith("tcp://")):  # Kubernetes
            values[name] = parse_json_or_comma_list(text) if is_list_field(field) else text
    return values


def _read_launcher_variables(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Read variables by which PyTorch launchers such as torchrun identify a machine
    (https://docs.pytorch.org/docs/stable/elastic/run.html). Returns {} if `nnodes` is 1, because then each program that
    torchrun started may serve a model of its own.
    """
    if str(values.get("nnodes", 1)) == "1":
        return {}
    names = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT", "node_rank": "RANK"}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens on that port
        del names["master_port"]
    return {key: (name, os.environ[name]) for key, name in names.items() if key not in values and name in os.environ}


def _read_toml(config: str) -> dict[str, Any]:
    """`config`: a path or the name of a preset. Keys may be spelled with dashes."""
    path = PRESETS_FOLDER / f"{config}.toml" if config in preset_names() and not Path(config).exists() else Path(config)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = unsupported_options.suggest_nearest(config, preset_names()) or f"presets are {', '.join(preset_names())}"
        raise ConfigError(f"cannot read --config {config}: {error.strerror}; {near}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {config} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}
