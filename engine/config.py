"""How an engine is set up: one frozen model, and the reader that fills it and any model of settings."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from quire.engine.errors import ConfigError

PREFIX = "QUIRE_"
"""Of environment variables that are settings."""
PRESETS = Path(__file__).resolve().parent.parent / "configs"
DEMO_MODEL = str(PRESETS / "demo")
"""The embedded model."""

_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Settings = TypeVar("Settings", bound=BaseModel)


class EngineConfig(BaseModel):
    """Fields keep vLLM's flag names where the meaning is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(DEMO_MODEL, description="Local directory or hub id; default: the embedded story-teller")
    tokenizer: str | None = Field(None, description="Directory or hub id of the tokenizer, if not the model's")
    chat_template: str | None = Field(None, description="Jinja file of the chat template, if not the model's")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id")
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, nothing is read")
    dtype: Dtype = Field(
        "auto", description="Type of weights and KV cache; auto: the checkpoint's, bfloat16 on CPU for float16"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one")
    attention_backend: str = Field(
        "auto", description="Attention kernels: auto, flash, torch_varlen, triton, cpu, reference"
    )
    deterministic: bool = Field(
        False, description="On a GPU: tokens that do not depend on the batch, to the bit, slower; on a CPU always so"
    )
    enforce_eager: bool = Field(False, description="Start the kernels of a decode one by one, not as CUDA graphs")
    max_model_len: int | None = Field(
        None, ge=1, description="Context length in tokens; default: what the memory allows"
    )
    max_num_seqs: int = Field(256, ge=1, le=4096, description="Most sequences in one step")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Most tokens in one step; longer prompts are chunked")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory to use")
    kv_cache_memory: float | None = Field(None, gt=0, description="GiB for the KV cache; default: fitted to memory")
    num_kv_blocks: int | None = Field(None, ge=1, description="Pages of the KV cache, instead of a size in GiB")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV of prompts that start alike")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; default: all cores")
    engine_heartbeat_timeout: float = Field(10.0, gt=0, description="Seconds without a sign of life that end an engine")
    engine_step_timeout: float = Field(120.0, gt=0, description="Seconds without progress in a step that end an engine")
    max_engine_starts: int = Field(5, ge=1, description="Failed starts in a row after which a dead engine is given up")
    seed: int = Field(0, description="Seed of dummy weights")

    @field_validator("max_model_len", "max_num_batched_tokens", mode="before")
    @classmethod
    def with_unit(cls, value: object) -> object:
        """As vLLM reads them: 32k is 32,000 and 32K is 32,768."""
        if isinstance(value, str) and value[:-1].isdecimal() and value[-1] in _UNITS:
            return int(value[:-1]) * _UNITS[value[-1]]
        return value


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
