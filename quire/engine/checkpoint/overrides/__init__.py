from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.model_resolver import (
    check_config_fields,
    read_generation_defaults,
    read_model_config,
    read_raw_config,
    resolve_model,
    resolve_weights,
)
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.common.folder_reader import convert_parsed_json, read_json_if_present
from quire.engine.common.request_params import MODEL_DEFAULT_FIELDS
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import GenerationConfigFields

_CONFIG_FILE, _GENERATION_CONFIG_FILE = "config.json", "generation_config.json"
_NESTED_CONFIG_SUFFIX = "_config"


def resolve_model_with_overrides(config: EngineConfig) -> Path:
    """If hf_overrides is set, return a folder of links with a changed config.json. Raises ModelError, and ConfigError
    for GGUF files.
    """
    path = resolve_model(config.model, config.revision)
    if not config.hf_overrides:
        return path
    if path.is_file():
        raise ConfigError("hf_overrides: a GGUF file has no config.json to merge them into", param="hf_overrides")
    raw = read_json_if_present(path / _CONFIG_FILE)
    if raw is None:
        raise ModelError(f"model: {path.absolute().name} has no {_CONFIG_FILE}")
    content = json.dumps(merge_overrides(raw, config.hf_overrides)).encode()
    return _make_linked_folder(path.absolute(), content)


def load_model_config(config: EngineConfig, path: Path) -> ModelConfig:
    """Raises ModelError."""
    tokenizer = None if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    return read_model_config(path, config.model_impl, tokenizer, config.chat_template, resolve_weights(config))


def read_raw_config_with_overrides(config: EngineConfig) -> tuple[dict[str, Any], Path | None]:
    if not config.hf_overrides:
        return read_raw_config(config.model, config.revision)
    raw, folder = read_raw_config(config.model, config.revision)
    if folder is not None and folder.is_file():
        raise ConfigError("hf_overrides: a GGUF file has no config.json to merge them into", param="hf_overrides")
    merged = merge_overrides(raw, config.hf_overrides)
    check_config_fields(merged, _CONFIG_FILE)
    return merged, folder


def merge_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for name, value in overrides.items():
        inner = merged.get(name)
        if name.endswith(_NESTED_CONFIG_SUFFIX) and isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[name] = merge_overrides(inner, value)
        else:
            merged[name] = value
    return merged


def read_sampling_defaults(config: EngineConfig) -> dict[str, float]:
    """Raises ModelError, or ConfigError naming the wrong setting."""
    source = config.generation_config
    defaults: dict[str, float] = {}
    if source == "auto":
        defaults = read_generation_defaults(resolve_model(config.model, config.revision))
    elif source != "vllm":
        defaults = _read_folder_defaults(Path(source).expanduser())
    overrides = dict(config.override_generation_config or {})
    known = [each.name for each in MODEL_DEFAULT_FIELDS]
    unknown = sorted(overrides.keys() - {*known, "max_new_tokens"})
    if unknown:
        raise ConfigError(
            f"override_generation_config: {unknown[0]} is not a sampling default; the defaults are "
            f"{', '.join(known)} and max_new_tokens",
            param="override_generation_config",
        )
    try:
        convert_parsed_json(overrides, GenerationConfigFields, "override_generation_config")
        max_tokens_default = _max_tokens_default(overrides, "override_generation_config")
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
    return defaults | max_tokens_default


def _read_folder_defaults(folder: Path) -> dict[str, float]:
    try:
        content = read_json_if_present(folder / _GENERATION_CONFIG_FILE)
        if content is None:
            raise ModelError(
                f"there is no {_GENERATION_CONFIG_FILE} in {str(folder)!r}; auto uses the model's, vllm none"
            )
        return read_generation_defaults(folder) | _max_tokens_default(content, _GENERATION_CONFIG_FILE)
    except ModelError as error:
        raise ConfigError(f"generation_config: {error.message}", param="generation_config") from None


def _max_tokens_default(content: Mapping[str, Any], label: str) -> dict[str, float]:
    max_new_tokens = content.get("max_new_tokens")
    if max_new_tokens is None:
        return {}
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ModelError(f"{label}: max_new_tokens: expected an integer of 1 or more, got {max_new_tokens!r}")
    return {"max_tokens": max_new_tokens}


def _make_linked_folder(path: Path, content: bytes) -> Path:
    files = sorted(path.iterdir())
    fingerprint = "\n".join([str(path), *(f"{each.name} {each.stat().st_mtime_ns}" for each in files if each.exists())])
    dir_name = hashlib.blake2b(fingerprint.encode() + b"\n" + content, digest_size=10).hexdigest()
    target_dir = _overrides_cache_dir() / dir_name / path.name
    if (target_dir / _CONFIG_FILE).exists():
        return target_dir
    try:
        target_dir.parent.parent.mkdir(parents=True, exist_ok=True)
        temp_dir = Path(tempfile.mkdtemp(prefix=f"{dir_name}-", dir=target_dir.parent.parent))
    except OSError as error:
        raise ConfigError(
            f"hf_overrides: cannot write {target_dir.parent.parent}: {error.strerror}; "
            "XDG_CACHE_HOME selects another place",
            param="hf_overrides",
        ) from None
    (temp_dir / path.name).mkdir()
    for file in files:
        if file.name != _CONFIG_FILE:
            (temp_dir / path.name / file.name).symlink_to(file.resolve())
    (temp_dir / path.name / _CONFIG_FILE).write_bytes(content)
    try:
        temp_dir.rename(target_dir.parent)
    except OSError:  # another process was faster
        shutil.rmtree(temp_dir, ignore_errors=True)
    return target_dir


def _overrides_cache_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "quire" / "overrides"
