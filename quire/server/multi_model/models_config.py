from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.common.folder_reader import describe_validation_error
from quire.engine.settings.settings_reader import load_settings
from quire.server.adapter_registry import configured_adapter_names
from quire.server.config import ServerConfig
from quire.server.multi_model.presets import ModelPreset, parse_preset

_DEFAULT_KV_GIB = 1.0
"""This default is fixed, because a share of the machine's memory would depend on other programs."""
_MODEL_SETTINGS = {
    *EngineConfig.model_fields,
    "served_model_name",
    "lora_modules",
    "max_logprobs",
    "max_queued_requests",
    "max_queued_tokens",
    "trust_request_chat_template",
    "tool_call_parser",
    "tool_strict_level",
    "strict_tool_calls",
    "reasoning_parser",
    "allow_unknown_roles",
    "return_tokens_as_token_ids",
    "enable_per_request_metrics",
    "default_chat_template_kwargs",
    "chat_template_content_format",
}
_PRESET_KEYS = ("system", "parameters")
"""A table that names another table as its model is an alias. Besides `model`, it may have only these keys and
`served_model_name`.
"""
_FILE_ONLY_SETTINGS = {"kv_offload_dir", "kv_offload_tier", "scheduler_cls", "executor_cls"}
"""HTTP requests cannot set these, because they write to the disk or run code."""
_MAX_NAME_LENGTH = 256
_Seconds = Annotated[float, Meta(ge=0)]


class ModelsFileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`memory` is in GiB."""

    memory: Annotated[float, Meta(gt=0)] | None = None
    idle_seconds: _Seconds = 600.0
    slice_seconds: _Seconds = 10.0
    sleep_level: Literal[1, 2] = 1


_FORMAT_HINT = (
    'each model is a table of its name, such as ["small"] with model = "/models/small"; '
    f"before them there may be {', '.join(ModelsFileOptions.__struct_fields__)}"
)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    config: ServerConfig
    idle_seconds: float
    """Seconds until an idle model sleeps; 0: never."""
    sleep_level: int
    """1: the engine's process stays and wakes fast; 2: it ends."""


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    entries: tuple[ModelEntry, ...]
    """The first entry is the default, loaded at the start."""
    memory_limit_bytes: int | None
    """Limit of all awake models together; None: unlimited."""
    slice_seconds: float
    """A model with open requests stays awake at least this long before it makes room for another one."""
    defaults: ModelsFileOptions
    flags: Mapping[str, Any]
    presets: Mapping[str, ModelPreset] = field(default_factory=dict)

    def parse_added_entry(self, name: str, settings: Mapping[str, Any]) -> ModelEntry:
        """Raises ConfigError, also for settings that only the file may have."""
        if not name or len(name) > _MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
            raise ConfigError(f"model: a name has 1 to {_MAX_NAME_LENGTH} printable characters", param="model")
        if foreign := sorted(settings.keys() & {*_FILE_ONLY_SETTINGS, *_PRESET_KEYS}):
            raise ConfigError(f"settings: {foreign[0]} can be set only in the file", param="settings")
        try:
            return _parse_entry("settings", name, settings, self.defaults, self.flags)
        except ConfigError as error:
            raise ConfigError(error.message, param="settings") from None


def read_models_file(path: Path, flags: Mapping[str, Any]) -> ModelsConfig:
    """`flags` are settings for every model. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"models: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"models: {path} is not TOML: {error}") from None
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    try:
        options = msgspec.convert(
            {name: value for name, value in document.items() if name not in tables}, ModelsFileOptions
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"models: {path}: {describe_validation_error(error)}; {_FORMAT_HINT}") from None
    if not tables:
        raise ConfigError(f"models: {path} has no model: {_FORMAT_HINT}")
    return parse_model_tables(f"models: {path}", tables, options, flags)


def parse_model_tables(
    where: str, tables: Mapping[str, Mapping[str, Any]], options: ModelsFileOptions, flags: Mapping[str, Any]
) -> ModelsConfig:
    """`where`: prefix of errors. Raises ConfigError."""
    aliases = {name: table for name, table in tables.items() if table.get("model") in tables and table["model"] != name}
    entries = [
        _parse_entry(f"{where}: {name}", name, _without_preset_keys(table), options, flags)
        for name, table in tables.items()
        if name not in aliases
    ]
    presets: dict[str, ModelPreset] = {}
    for name, table in tables.items():
        _check_alias_table_keys(f"{where}: {name}", table, aliases)
        preset = parse_preset(f"{where}: {name}", table.get("system"), table.get("parameters", {}))
        own_names = [name, *(table.get("served_model_name", []) if name in aliases else [])]
        base = table["model"] if name in aliases else name
        place = next(place for place, entry in enumerate(entries) if entry.name == base)
        if name in aliases:
            entries[place] = _with_more_served_names(entries[place], own_names)
        else:
            own_names = list(entries[place].config.model_names)
        if preset.system is not None or preset.parameters:
            presets |= dict.fromkeys(own_names, preset)
    seen: dict[str, str] = {}
    for entry in entries:
        entry_names = (*entry.config.model_names, *configured_adapter_names(entry.config))
        if duplicate := next((name for name in entry_names if entry_names.count(name) > 1), None):
            raise ConfigError(f"{where}: {entry.name} uses the name {duplicate!r} twice")
        for name in entry_names:
            if (other := seen.setdefault(name, entry.name)) != entry.name:
                raise ConfigError(f"{where}: {other} and {entry.name} are both called {name!r}")
    memory = None if options.memory is None else int(options.memory * 2**30)
    return ModelsConfig(tuple(entries), memory, options.slice_seconds, options, flags, presets)


def _without_preset_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _PRESET_KEYS}


def _with_more_served_names(entry: ModelEntry, names: Sequence[str]) -> ModelEntry:
    config = entry.config.model_copy(update={"served_model_name": [*entry.config.served_model_name, *names]})
    return replace(entry, config=config)


def _check_alias_table_keys(where: str, table: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    if not any(table is each for each in names.values()):
        return
    if table["model"] in names:
        raise ConfigError(f"{where}: model: {table['model']} is itself a preset; give the table that has the model")
    if more := sorted(table.keys() - {"model", "served_model_name", *_PRESET_KEYS}):
        raise ConfigError(f"{where}: {more[0]} is an engine setting: set it in the table of {table['model']}")
    aliases = table.get("served_model_name", [])
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise ConfigError(f"{where}: served_model_name: must be a list of names")


def _parse_entry(
    where: str, name: str, table: Mapping[str, Any], defaults: ModelsFileOptions, flags: Mapping[str, Any]
) -> ModelEntry:
    settings = dict(table)
    own_options = {key: settings.pop(key) for key in ("idle_seconds", "sleep_level") if key in settings}
    try:
        options = msgspec.convert(own_options, ModelsFileOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {describe_validation_error(error)}") from None
    if foreign := sorted(settings.keys() & ServerConfig.model_fields.keys() - _MODEL_SETTINGS):
        raise ConfigError(f"{where}: {foreign[0]} applies to the whole server: give it on the command line")
    if "model" not in settings:
        raise ConfigError(f"{where}: model is missing: a folder, a GGUF file, a hub id or smollm2")
    settings = {"kv_cache_memory": _DEFAULT_KV_GIB} | dict(flags) | settings
    if settings.get("num_kv_blocks") is not None:
        settings.pop("kv_cache_memory")
    if isinstance(more := settings.get("served_model_name", []), list):  # load_settings raises for other types
        settings["served_model_name"] = [name, *more]
    try:
        config = load_settings(ServerConfig, settings, origin="table " + name)
        configured_adapter_names(config)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return ModelEntry(
        name,
        config,
        options.idle_seconds if "idle_seconds" in own_options else defaults.idle_seconds,
        options.sleep_level if "sleep_level" in own_options else defaults.sleep_level,
    )
