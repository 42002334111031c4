"""A model's files as a configuration asks for them: --hf-overrides in config.json, and the defaults of sampling."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.files import (
    check_planned,
    read_generation_defaults,
    read_model_config,
    read_raw_config,
    resolve_model,
    stored_at,
)
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import GenerationFields
from quire.engine.folder_reader import convert_parsed_json, read_json_if_present

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_PART = "_config"
"""The end of the names of configurations inside config.json. Overrides of these are merged, others replace a value."""


def model_path(config: EngineConfig) -> Path:
    """As resolve_model, of the configuration's model; with hf_overrides a folder whose config.json has them.

    That folder consists of links to the model's files. It has a place of its own for each model and each content, so
    all processes of a server read the same. Raises ModelError, and ConfigError for a model without a config.json.
    """
    path = resolve_model(config.model, config.revision)
    if not config.hf_overrides:
        return path
    if path.is_file():
        raise ConfigError("hf_overrides: a GGUF file has no config.json to merge them into", param="hf_overrides")
    raw = read_json_if_present(path / _CONFIG)
    if raw is None:
        raise ModelError(f"model: {path.absolute().name} has no {_CONFIG}")
    content = json.dumps(with_overrides(raw, config.hf_overrides)).encode()
    return _linked(path.absolute(), content)


def read_configured(config: EngineConfig, path: Path) -> ModelConfig:
    """What the model's files say, read as the settings ask for. Raises ModelError."""
    tokenizer = None if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    return read_model_config(path, config.model_impl, tokenizer, config.chat_template, stored_at(config))


def configured(config: EngineConfig) -> tuple[dict[str, Any], Path | None]:
    """As read_raw_config, of the configuration's model, with its hf_overrides."""
    if not config.hf_overrides:
        return read_raw_config(config.model, config.revision)
    raw, folder = read_raw_config(config.model, config.revision)
    if folder is not None and folder.is_file():
        raise ConfigError("hf_overrides: a GGUF file has no config.json to merge them into", param="hf_overrides")
    merged = with_overrides(raw, config.hf_overrides)
    check_planned(merged, _CONFIG)
    return merged, folder


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content with other values; those of a configuration inside it are merged into that."""
    merged = dict(raw)
    for name, value in overrides.items():
        inner = merged.get(name)
        if name.endswith(_PART) and isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[name] = with_overrides(inner, value)
        else:
            merged[name] = value
    return merged


def sampling_defaults(config: EngineConfig) -> dict[str, float]:
    """What requests sample with where they do not say, and as `max_tokens` the most that any may generate: of
    generation_config.json, as the settings choose it. Raises ModelError, and ConfigError naming the setting."""
    source = config.generation_config
    defaults: dict[str, float] = {}
    if source == "auto":
        defaults = read_generation_defaults(resolve_model(config.model, config.revision))
    elif source != "vllm":
        defaults = _defaults_of(Path(source).expanduser())
    overrides = dict(config.override_generation_config or {})
    unknown = sorted(overrides.keys() - {*_SAMPLING, "max_new_tokens"})
    if unknown:
        raise ConfigError(
            f"override_generation_config: {unknown[0]} is no default that requests have; there are "
            f"{', '.join(_SAMPLING)} and max_new_tokens",
            param="override_generation_config",
        )
    try:
        convert_parsed_json(overrides, GenerationFields, "override_generation_config")
        most = _most_tokens(overrides, "override_generation_config")
    except ModelError as error:
        raise ConfigError(error.message.removeprefix("model: "), param="override_generation_config") from None
    for name, value in overrides.items():
        if name == "max_new_tokens":
            continue
        defaults.pop(name, None)
        if value is not None:
            defaults[name] = value
    if "max_new_tokens" in overrides:
        defaults.pop("max_tokens", None)
    return defaults | most


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _defaults_of(folder: Path) -> dict[str, float]:
    """Of a folder that the setting generation_config names."""
    try:
        content = read_json_if_present(folder / _GENERATION)
        if content is None:
            raise ModelError(f"there is no {_GENERATION} in {str(folder)!r}; auto is the model's, and vllm none")
        return read_generation_defaults(folder) | _most_tokens(content, _GENERATION)
    except ModelError as error:
        raise ConfigError(f"generation_config: {error.message}", param="generation_config") from None


def _most_tokens(content: Mapping[str, Any], label: str) -> dict[str, float]:
    most = content.get("max_new_tokens")
    if most is None:
        return {}
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ModelError(f"{label}: max_new_tokens: expected an integer of 1 or more, got {most!r}")
    return {"max_tokens": most}


def _linked(path: Path, content: bytes) -> Path:
    """A folder of links to what is in `path`, but with this config.json."""
    files = sorted(path.iterdir())
    told = "\n".join([str(path), *(f"{each.name} {each.stat().st_mtime_ns}" for each in files if each.exists())])
    name = hashlib.blake2b(told.encode() + b"\n" + content, digest_size=10).hexdigest()
    place = _folder() / name / path.name
    if (place / _CONFIG).exists():
        return place
    try:
        place.parent.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place.parent.parent))
    except OSError as error:
        raise ConfigError(
            f"hf_overrides: cannot write {place.parent.parent}: {error.strerror}; XDG_CACHE_HOME names another place",
            param="hf_overrides",
        ) from None
    (made / path.name).mkdir()
    for file in files:
        if file.name != _CONFIG:
            (made / path.name / file.name).symlink_to(file.resolve())
    (made / path.name / _CONFIG).write_bytes(content)
    try:
        made.rename(place.parent)
    except OSError:  # another process was faster
        shutil.rmtree(made, ignore_errors=True)
    return place


def _folder() -> Path:
    """Where such folders are kept: the user's own place for what can be made again."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "quire" / "overrides"
