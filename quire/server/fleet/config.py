"""The file of `quire serve --models`: the models, and how much memory the models that are awake may take together."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ModelError
from quire.engine.folder import explained
from quire.engine.settings.reader import load
from quire.server.adapters import named_adapters
from quire.server.config import ServerConfig
from quire.server.fleet.presets import Preset, checked_preset

_KV_GIB = 1.0
"""What a model gets for keys and values where neither it nor the command line says; the share of the machine's memory
that a model alone would get depends on what else runs."""
_OF_A_MODEL = {
    *EngineConfig.model_fields,
    *("served_model_name", "lora_modules", "max_logprobs", "max_queued_requests", "max_queued_tokens"),
    *(
        "trust_request_chat_template",
        "tool_call_parser",
        "strict_tool_calls",
        "reasoning_parser",
        "allow_unknown_roles",
    ),
    *("return_tokens_as_token_ids", "enable_per_request_metrics"),
    *("default_chat_template_kwargs", "chat_template_content_format"),
}
"""The settings that a model may have for itself; the others are the server's."""
_OF_A_NAME = ("system", "parameters")
"""Keys that are a name's: a table whose model is another table has these alone, and `served_model_name`. It is a name
of that table's model."""
_OF_THE_FILE = {"kv_offload_dir", "kv_offload_tier", "scheduler_cls", "executor_cls"}
"""Settings that write to the disk or run somebody's code: not over HTTP."""
_MAX_NAME = 256
_Seconds = Annotated[float, Meta(ge=0)]


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in the file before its tables; memory in GiB."""

    memory: Annotated[float, Meta(gt=0)] | None = None
    idle_seconds: _Seconds = 600.0
    slice_seconds: _Seconds = 10.0
    sleep_level: Literal[1, 2] = 1


_FORM = (
    'each model is a table of its name, such as ["small"] with model = "/models/small"; '
    f"before them there may be {', '.join(Bounds.__struct_fields__)}"
)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    config: ServerConfig
    idle_seconds: float
    """After so many seconds without a request it sleeps; 0: never for that reason."""
    sleep_level: int
    """1: its engine's process stays, and wakes soon; 2: that ends too."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    entries: tuple[ModelEntry, ...]
    """At least one; the first answers what names no model, and is loaded at the start."""
    memory: int | None
    """Bytes that the models that are awake may take together; None: whatever."""
    slice_seconds: float
    """How long a model with open requests stays awake before it must make room."""
    bounds: Bounds
    """What holds for a model that says nothing else."""
    flags: Mapping[str, Any]
    """The settings that the command line gives to every model."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """By name, what requests for it get where they say nothing else."""

    def entry(self, name: str, settings: Mapping[str, Any]) -> ModelEntry:
        """A model that is not in the file, of what a table would say. Raises ConfigError that names the key."""
        if not name or len(name) > _MAX_NAME or not name.isprintable() or name != name.strip():
            raise ConfigError(f"model: a name has 1 to {_MAX_NAME} printable characters", param="model")
        if foreign := sorted(settings.keys() & {*_OF_THE_FILE, *_OF_A_NAME}):
            raise ConfigError(f"settings: {foreign[0]} can be set in the file alone", param="settings")
        try:
            return _entry("settings", name, settings, self.bounds, self.flags)
        except ConfigError as error:
            raise ConfigError(error.message, param="settings") from None


def read_fleet(path: Path, flags: Mapping[str, Any]) -> FleetConfig:
    """`flags`: settings that the command line gives to every model. Raises ConfigError that names the table and key."""
    try:
        given = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"models: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"models: {path} is not TOML: {error}") from None
    tables = {name: value for name, value in given.items() if isinstance(value, dict)}
    try:
        bounds = msgspec.convert({name: value for name, value in given.items() if name not in tables}, Bounds)
    except msgspec.ValidationError as error:
        raise ConfigError(f"models: {path}: {explained(error)}; {_FORM}") from None
    if not tables:
        raise ConfigError(f"models: {path} has no model: {_FORM}")
    return fleet_of(f"models: {path}", tables, bounds, flags)


def fleet_of(
    where: str, tables: Mapping[str, Mapping[str, Any]], bounds: Bounds, flags: Mapping[str, Any]
) -> FleetConfig:
    """`where`: what an error begins with. Raises ConfigError that names the table and key."""
    names = {name: table for name, table in tables.items() if table.get("model") in tables and table["model"] != name}
    entries = [
        _entry(f"{where}: {name}", name, _without_name(table), bounds, flags)
        for name, table in tables.items()
        if name not in names
    ]
    presets: dict[str, Preset] = {}
    for name, table in tables.items():
        _check_names(f"{where}: {name}", table, names)
        preset = checked_preset(f"{where}: {name}", table.get("system"), table.get("parameters", {}))
        own = [name, *(table.get("served_model_name", []) if name in names else [])]
        base = table["model"] if name in names else name
        place = next(place for place, entry in enumerate(entries) if entry.name == base)
        if name in names:
            entries[place] = _with_names(entries[place], own)
        else:
            own = list(entries[place].config.model_names)
        if preset.system is not None or preset.parameters:
            presets |= dict.fromkeys(own, preset)
    seen: dict[str, str] = {}
    for entry in entries:
        called = (*entry.config.model_names, *named_adapters(entry.config))
        if twice := next((name for name in called if called.count(name) > 1), None):
            raise ConfigError(f"{where}: {entry.name} is called {twice!r} twice")
        for name in called:
            if (other := seen.setdefault(name, entry.name)) != entry.name:
                raise ConfigError(f"{where}: {other} and {entry.name} are both called {name!r}")
    memory = None if bounds.memory is None else int(bounds.memory * 2**30)
    return FleetConfig(tuple(entries), memory, bounds.slice_seconds, bounds, flags, presets)


def _without_name(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _OF_A_NAME}


def _with_names(entry: ModelEntry, names: Sequence[str]) -> ModelEntry:
    config = entry.config.model_copy(update={"served_model_name": [*entry.config.served_model_name, *names]})
    return replace(entry, config=config)


def _check_names(where: str, table: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name of a model whose table says more than a name may."""
    if not any(table is each for each in names.values()):
        return
    if table["model"] in names:
        raise ConfigError(f"{where}: model: {table['model']} is a name too; give the table that has the model")
    if more := sorted(table.keys() - {"model", "served_model_name", *_OF_A_NAME}):
        raise ConfigError(f"{where}: {more[0]} is the engine's, which is that of {table['model']}: say it there")
    aliases = table.get("served_model_name", [])
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise ConfigError(f"{where}: served_model_name: must be a list of names")


def _entry(where: str, name: str, table: Mapping[str, Any], bounds: Bounds, flags: Mapping[str, Any]) -> ModelEntry:
    """`where`: what an error begins with."""
    given = dict(table)
    own = {key: given.pop(key) for key in ("idle_seconds", "sleep_level") if key in given}
    try:
        ours = msgspec.convert(own, Bounds)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explained(error)}") from None
    if foreign := sorted(given.keys() & ServerConfig.model_fields.keys() - _OF_A_MODEL):
        raise ConfigError(f"{where}: {foreign[0]} is the whole server's: give it on the command line")
    if "model" not in given:
        raise ConfigError(f"{where}: model is missing: a folder, a GGUF file, a hub id or smollm2")
    given = {"kv_cache_memory": _KV_GIB} | dict(flags) | given
    if given.get("num_kv_blocks") is not None:
        given.pop("kv_cache_memory")
    if isinstance(more := given.get("served_model_name", []), list):  # else what reads it will say
        given["served_model_name"] = [name, *more]
    try:
        config = load(ServerConfig, given, origin="table " + name)
        named_adapters(config)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return ModelEntry(
        name,
        config,
        ours.idle_seconds if "idle_seconds" in own else bounds.idle_seconds,
        ours.sleep_level if "sleep_level" in own else bounds.sleep_level,
    )
