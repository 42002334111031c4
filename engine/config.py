"""How an engine is set up: one frozen model, and the reader that fills it and any model of settings."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from quire.engine import advice
from quire.engine.errors import ConfigError

PREFIX = "QUIRE_"
"""Of environment variables that are settings."""
OTHER_VARIABLES = {"QUIRE_CPU_ISA", "QUIRE_LOG_FORMAT"}
"""Not the engine's: kernels/cpu/native.py reads the first, and the server the others, which look like load_format and
max_loras mistyped."""
_KUBERNETES = re.compile(
    r"QUIRE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_PROTO|_PORT|_ADDR)?)|QUIRE_\w+_PORT"
)
"""What Kubernetes sets for services whose names begin with quire, beside QUIRE_PORT=tcp://… for one of that name."""
PRESETS = Path(__file__).resolve().parent.parent / "configs"
DEMO_MODEL = str(PRESETS / "demo")
"""The embedded model."""
DISK_GIB = 10
"""What --kv-offload-dir may take where nothing is said."""

_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def _plain_dtype(given: Any) -> Any:
    """vLLM's other names."""
    return {"half": "float16", "float": "float32"}.get(given, given) if isinstance(given, str) else given


Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_plain_dtype)]
Settings = TypeVar("Settings", bound=BaseModel)


class SpeculativeConfig(BaseModel):
    """How tokens are guessed, by vLLM's names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["none", "ngram", "suffix", "grammar", "draft_model", "eagle", "eagle3", "medusa"]
    """none guesses nothing; ngram looks in the request's own tokens, suffix also in recent answers to requests of the
    same cache salt; grammar guesses what a request's grammar forces, as the others do too; draft_model asks `model`,
    and eagle, eagle3 and medusa the heads there."""
    model: str | None = None
    """Local directory or hub id of a smaller model with the same vocabulary, or of heads for the served one."""
    num_speculative_tokens: int = Field(8, ge=1, le=32)
    """The most guesses of one sequence in a step."""
    prompt_lookup_min: int = Field(1, ge=1, le=32)
    """Tokens that must be the same before a place for it to be looked at."""
    prompt_lookup_max: int | None = None
    """vLLM's, without effect: the longest match is looked for, and no guess changes an answer."""

    @field_validator("method", mode="before")
    @classmethod
    def without_mtp(cls, value: object) -> object:
        if isinstance(value, str) and (value == "mtp" or value.endswith("_mtp")):
            raise ValueError("MTP layers are not read so far; other methods guess without them")
        return value

    @property
    def hidden_states(self) -> bool:
        """Whether heads guess from the served model's hidden states."""
        return self.method in ("eagle", "eagle3", "medusa")

    @model_validator(mode="after")
    def with_model(self) -> SpeculativeConfig:
        if (self.method == "draft_model" or self.hidden_states) != (self.model is not None):
            raise ValueError("draft_model, eagle, eagle3 and medusa need a model, and no other method takes one")
        return self


class EngineConfig(BaseModel):
    """Fields keep vLLM's flag names where the meaning is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(
        DEMO_MODEL,
        description="Local directory, .gguf file, hub id or short name; default: the embedded story-teller",
    )
    tokenizer: str | None = Field(None, description="Directory or hub id of the tokenizer, if not the model's")
    skip_tokenizer_init: bool = Field(
        False, description="No tokenizer: requests give token ids, and get them with return_token_ids"
    )
    chat_template: str | None = Field(None, description="Jinja file of the chat template, if not the model's")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id")
    weights: str | None = Field(
        None, description="Directory, or .gguf file, of other weights of the model's shape, if not the model's own"
    )
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto",
        description="Who computes the model: a file of Quire, transformers' class; auto: that where no file does",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights, nothing is read")
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV cache; auto: the checkpoint's, bfloat16 for float16 on CPU, float32 on GPU",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = Field(
        None, description="Quantize the weights while they are loaded"
    )
    quantize_embedding: bool | None = Field(
        None, description="Make embedding and head 8-bit integers while they are loaded; default: with quantization"
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3"] = Field(
        "auto", description="Type of keys and values; auto: that of the model; int8, fp8: 8 bits, half the memory"
    )
    activation_bits: Literal["auto", "8", "16"] = Field(
        "auto",
        description="Bits to which a CPU rounds what it multiplies with integer weights; auto: 8, and 16 where inputs "
        "are many times the others",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if there is one")
    attention_backend: str = Field(
        "auto", description="Attention kernels: auto, flash3, flash4, flash, torch_varlen, triton, cpu, reference"
    )
    deterministic: bool = Field(
        False,
        description="On a GPU: tokens that do not depend on the batch, slower; on a CPU always so, but not in float16",
    )
    enforce_eager: bool = Field(False, description="Start the kernels of a decode one by one, not as CUDA graphs")
    warmup_seconds: float = Field(
        30.0, ge=0, description="Seconds before ready for a GPU's decode graphs; the rest are captured when idle"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Context length in tokens; default: what the memory allows"
    )
    max_num_seqs: int = Field(256, ge=1, le=4096, description="Most sequences in one step")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Most tokens in one step; longer prompts are chunked")
    long_prefill_token_threshold: int | None = Field(
        None, ge=1, description="Most tokens of one prompt in a step, so that others share it; default: all that fit"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory to use")
    kv_cache_memory: float | None = Field(None, gt=0, description="GiB for the KV cache; default: fitted to memory")
    num_kv_blocks: int | None = Field(None, ge=1, description="Pages of the KV cache, instead of a size in GiB")
    state_memory: float | None = Field(None, gt=0, description="GiB of it for large states; default: half, at most 2")
    snapshot_tokens: int = Field(512, ge=16, multiple_of=16, description="Distance of large states' snapshots")
    enable_prefix_caching: bool = Field(True, description="Reuse the KV of prompts that start alike")
    kv_offload_memory: float | None = Field(
        None, gt=0, description="GiB of the host's memory for KV of earlier prompts, beside the KV cache"
    )
    kv_offload_dir: str | None = Field(
        None, min_length=1, description="Directory for KV of earlier prompts, which survives a restart"
    )
    kv_offload_disk: float | None = Field(
        None, gt=0, description=f"GiB that --kv-offload-dir may take; default: {DISK_GIB}"
    )
    kv_offload_tier: str | None = Field(
        None, pattern=r"^[\w.]+:\w+$", description="MODULE:FUNCTION that makes a tier of your own for such KV"
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto", description="auto: all that the model can; generate: tokens alone; pooling: vectors alone"
    )
    pooling_type: Literal["auto", "last", "mean", "cls"] = Field(
        "auto", description="Which hidden states make an embedding; auto: as the model's files say"
    )
    classifier_from_token: list[str] = Field(
        default_factory=list,
        description="Two tokens whose logits make a decoder's score: no,yes for Qwen3-Reranker",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="How tokens are guessed ahead, without changing one: none, ngram, suffix, grammar, or JSON as "
        'vLLM takes it, such as {"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 4}; '
        "default: on a CPU what grammars force",
    )
    enable_lora: bool = Field(False, description="Serve low-rank adapters (LoRA) beside the model")
    max_loras: int = Field(8, ge=1, le=256, description="Most adapters in one step")
    max_lora_rank: int = Field(16, ge=1, le=256, description="Largest rank of an adapter")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="Adapters that the host's memory keeps at hand; default: four times --max-loras"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="Processes that compute every layer together, each with its part of the model"
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="Processes that each compute some of the layers, one after the other"
    )
    data_parallel_size: int = Field(
        1, ge=1, le=32, description="Engines of the same model beside each other, which share the requests"
    )
    nnodes: int = Field(
        1, ge=1, le=64, description="Machines that the ranks of --tensor-parallel-size are divided among"
    )
    node_rank: int = Field(0, ge=0, le=63, description="Which of them this is; 0 serves, the others compute for it")
    master_addr: str = Field(
        "127.0.0.1", min_length=1, description="Address of machine 0 in a private network, where the others join it"
    )
    master_port: int = Field(29501, ge=1, le=65535, description="Port of --master-addr")
    nodes_timeout: float = Field(600.0, gt=0, description="Seconds that machines wait for each other at the start")
    threads: int | None = Field(None, ge=1, description="CPU threads that compute; default: all cores")
    niceness: int = Field(
        0, ge=0, le=19, description="How far the engine's process gives way to others on the CPU, where it has its own"
    )
    engine_heartbeat_timeout: float = Field(10.0, gt=0, description="Seconds without a sign of life that end an engine")
    engine_step_timeout: float = Field(120.0, gt=0, description="Seconds without progress in a step that end an engine")
    max_engine_starts: int = Field(5, ge=1, description="Failed starts in a row after which a dead engine is given up")
    seed: int = Field(0, description="Seed of dummy weights")

    @property
    def ranks(self) -> int:
        """Processes that compute one engine's model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_here(self) -> int:
        """Those of them that are on one machine."""
        return self.ranks // self.nnodes

    @property
    def most_running(self) -> int:
        """Most sequences that all engines compute at a time."""
        return self.max_num_seqs * self.data_parallel_size

    @property
    def disk_gib(self) -> float:
        """What --kv-offload-dir may take."""
        return DISK_GIB if self.kv_offload_disk is None else self.kv_offload_disk

    @field_validator("speculative_config", mode="before")
    @classmethod
    def with_method(cls, value: object) -> object:
        """A method's name alone, or JSON text."""
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("{"):
            return {"method": value}
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None

    @field_validator("max_model_len", "max_num_batched_tokens", mode="before")
    @classmethod
    def with_unit(cls, value: object) -> object:
        """As vLLM reads them: 32k is 32,000 and 32K is 32,768."""
        if isinstance(value, str) and value[:-1].isdecimal() and value[-1] in _UNITS:
            return int(value[:-1]) * _UNITS[value[-1]]
        return value

    @model_validator(mode="after")
    def with_nodes(self) -> EngineConfig:
        if self.node_rank >= self.nnodes:
            raise ValueError(f"node_rank: machine {self.node_rank} is none of the {self.nnodes} of nnodes, from 0 on")
        if self.nnodes == 1:
            return self
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) > 1:
                raise ValueError(f"nnodes: only ranks are on several machines so far, which {name} has none of; use 1")
        if self.tensor_parallel_size % self.nnodes:
            ranks = f"tensor_parallel_size {self.tensor_parallel_size}"
            raise ValueError(f"nnodes: {ranks} cannot be divided evenly among {self.nnodes} machines")
        if self.master_addr in ("0.0.0.0", "::"):
            raise ValueError(
                f"master_addr: {self.master_addr} is no address where others reach machine 0; give its own"
            )
        return self


def load(
    model: type[Settings],
    given: Mapping[str, Any],
    config: str | None = None,
    *,
    origin: str = "flag --{dashed}",
    others: Collection[str] | None = None,
) -> Settings:
    """The settings: `given` before QUIRE_* variables before the TOML file `config` before defaults.

    `origin` says where given values came from. `others`: settings that are not the model's, which variables may set all
    the same; None: any that are not nearly one of the model's. Raises ConfigError in one line that names each bad
    value's key and where it came from.
    """
    _check_variables(model, others)
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
    for key, (variable, text) in _launched(values).items():
        values[key], origins[key] = text, f"environment variable {variable}"
    for key, value in values.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and not _encodable(text):
                raise ConfigError(f"{key}: is not UTF-8 text, got {text!r} ({origins[key]})")
    try:
        return model(**values)
    except ValidationError as error:
        known = [*model.model_fields, *(others or ())]
        raise ConfigError("; ".join(_describe(dict(item), origins, known) for item in error.errors())) from None


def _check_variables(model: type[BaseModel], others: Collection[str] | None) -> None:
    """Raise ConfigError for QUIRE_* variables that set nothing."""
    known = {PREFIX + name.upper() for name in (*model.model_fields, *(others or ()))}
    wrong = []
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if name in known or name in OTHER_VARIABLES or _KUBERNETES.fullmatch(name):
            continue
        if others is None and advice.is_server_s(name.removeprefix(PREFIX).lower()):
            continue
        advised = advice.on_setting(name.removeprefix(PREFIX).lower(), (each.lower()[len(PREFIX) :] for each in known))
        if advised or others is not None:
            wrong.append(f"environment variable {name}: no such setting{advised and f', {advised}'}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _encodable(text: str) -> bool:
    """False for arguments that are not UTF-8: Python keeps their bytes as surrogates, which no JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _describe(error: dict[str, Any], origins: Mapping[str, str], known: Sequence[str]) -> str:
    key = ".".join(map(str, error["loc"]))
    origin = origins.get(str(error["loc"][0]), "default") if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        advised = advice.on_setting(key, known)
        return f"{key}: no such setting{advised and f', {advised}'} ({origin})"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, got {error['input']!r} ({origin})"


def _environment(model: type[BaseModel]) -> dict[str, Any]:
    """The fields that QUIRE_* variables set, as text; lists as JSON or with commas."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        text = os.environ.get(PREFIX + name.upper())
        if text is not None and not (name == "port" and text.startswith("tcp://")):  # Kubernetes
            found[name] = split(text) if is_list(field) else text
    return found


def _launched(values: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Variables, and what they say, of settings that are not given: torchrun tells each machine who it is by these, as
    other launchers of PyTorch do (https://docs.pytorch.org/docs/stable/elastic/run.html). They count only where several
    machines are asked for: a program that torchrun has started may hold a model of its own."""
    if str(values.get("nnodes", 1)) == "1":
        return {}
    names = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT", "node_rank": "RANK"}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens at that port
        del names["master_port"]
    return {key: (name, os.environ[name]) for key, name in names.items() if key not in values and name in os.environ}


def _read_toml(config: str) -> dict[str, Any]:
    """A TOML file by path, or a preset by name. Keys may be written with dashes."""
    path = PRESETS / f"{config}.toml" if config in presets() and not Path(config).exists() else Path(config)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = advice.nearest(config, presets()) or f"presets are {', '.join(presets())}"
        raise ConfigError(f"cannot read --config {config}: {error.strerror}; {near}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {config} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}
