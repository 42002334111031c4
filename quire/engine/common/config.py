from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from quire.engine.common.config_types import (
    CheckpointQuantization,
    Dtype,
    JsonObject,
    KVEventsConfig,
    OnlineQuantization,
    SpeculativeConfig,
    normalize_quantization,
    unsupported_device_reason,
)
from quire.engine.common.types import EngineInfo

PRESETS_FOLDER = Path(__file__).resolve().parents[2] / "configs"
DEMO_MODEL = str(PRESETS_FOLDER / "demo")
DEFAULT_DISK_GIB = 10
"""Limit of --kv-offload-dir."""

DEFAULT_STEP_TOKENS, LARGE_GPU_STEP_TOKENS = 2048, 8192
"""The second number is for GPUs with at least LARGE_GPU_BYTES."""
LARGE_GPU_BYTES = 40 * 10**9

MAX_SEQUENCES = 4096
_MAX_GIB = 1_000_000
_BYTE_UNITS = {"g": 10**9, "G": 2**30, "m": 10**6, "M": 2**20, "t": 10**12, "T": 2**40}
_TOKEN_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}


def capacity_settings_from_info(info: EngineInfo) -> dict[str, int]:
    """Settings that give a new engine the same capacity, however much memory is free then."""
    settings = {"max_model_len": info.max_model_len, "num_kv_blocks": info.num_blocks}
    return settings if info.rope_context is None else settings | {"rope_context": info.rope_context}


class EngineConfig(BaseModel):
    """The engine's settings. Fields have the names of vLLM's flags if they mean the same."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    model: str = Field(
        DEMO_MODEL,
        description="Model to serve: a local directory, a .gguf file, a hub id or a short name; default: the "
        "embedded story-teller",
    )
    tokenizer: str | None = Field(None, description="Directory or hub id of the tokenizer; default: the model's own")
    skip_tokenizer_init: bool = Field(
        False, description="Load no tokenizer: requests send token ids, and get token ids with return_token_ids"
    )
    chat_template: str | None = Field(None, description="Jinja file of the chat template; default: the model's own")
    adapt_conversations: Literal["auto", "off"] = Field(
        "auto",
        description="auto rewrites messages that the chat template would drop or refuse into a form that it accepts; "
        "off refuses such conversations",
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub id")
    weights: str | None = Field(
        None, description="Directory or .gguf file of other weights with the model's shape; default: the model's own"
    )
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto",
        description="Model implementation: quire, transformers, or auto, which takes Quire's own if there is one",
    )
    hf_overrides: JsonObject | None = Field(
        None, description="JSON object merged into config.json before anything reads it"
    )
    generation_config: str = Field(
        "auto",
        min_length=1,
        description="Source of sampling defaults: auto (the model's generation_config.json), vllm (none), or a "
        "folder with such a file",
    )
    override_generation_config: JsonObject | None = Field(
        None,
        description="JSON object of sampling defaults that override the file's: temperature, top_p, max_new_tokens …",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto reads the checkpoint; dummy makes random weights and reads nothing"
    )
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV cache; auto: the checkpoint's, except bfloat16 for float16 on a CPU "
        "and for float32 on a GPU",
    )
    quantization: Annotated[
        Literal[OnlineQuantization, CheckpointQuantization] | None, BeforeValidator(normalize_quantization)
    ] = Field(
        None,
        description="int8, int4 and fp8 quantize the weights while loading; other names are checked against the "
        "checkpoint's own format",
    )
    quantize_embedding: bool | None = Field(
        None,
        description="Quantize the embedding and the output head to 8-bit integers while loading; default: if "
        "quantization does so",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "fp8", "fp8_e4m3"] = Field(
        "auto",
        description="Type of keys and values; auto: the model's, or bfloat16 if a quantized GGUF file is "
        "computed in float32; int8 and fp8 halve the memory",
    )
    activation_bits: Literal["auto", "8", "16"] = Field(
        "auto",
        description="Bits of activations that a CPU multiplies with integer weights; auto: 8, or 16 for blocks "
        "with outliers",
    )
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = Field(
        "auto",
        description="auto takes an NVIDIA or AMD GPU if there is one, else the CPU; mps and xpu use PyTorch's "
        "own operations",
    )
    attention_backend: str = Field(
        "auto",
        description="Attention kernels: auto, flash3, flash4, flash, torch_varlen, triton, sdpa, cpu or reference",
    )
    deterministic: bool = Field(
        False,
        description="On a GPU, make tokens independent of the batch, at some cost in speed; on a CPU they are, "
        "except in float16",
    )
    enforce_eager: bool = Field(False, description="Launch kernels one by one instead of using CUDA graphs")
    warmup_seconds: float = Field(
        30.0,
        ge=0,
        description="Seconds of the start for capturing CUDA graphs; the rest are captured when the engine is idle",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Context length in tokens; default: what the memory allows"
    )
    rope_context: int | None = Field(
        None,
        ge=1,
        description="Context length that selects the rotary scaling (LongRoPE, dynamic NTK); default: "
        "--max-model-len, or else the model's full context",
    )
    max_num_seqs: int = Field(256, ge=1, description="Maximum number of sequences in one step")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="Maximum number of tokens in one step; default: 2048, or 8192 on a GPU of 40 GB or more"
    )
    long_prefill_token_threshold: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tokens of one prompt in a step, so that long prompts do not delay others; "
        "default: no limit",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of the GPU's memory to use")
    block_size: int | None = Field(
        None,
        ge=1,
        description="Tokens per KV block; selects the first attention backend that has such blocks; default: the "
        "backend's",
    )
    kv_cache_memory: float | None = Field(None, gt=0, description="GiB for the KV cache; default: fitted to the memory")
    num_kv_blocks: int | None = Field(None, ge=1, description="Number of KV blocks, instead of a size in GiB")
    state_memory: float | None = Field(
        None,
        gt=0,
        description="GiB of the KV cache's memory for large recurrent states; default: on a GPU enough for "
        "--max-num-seqs, at most a third; on a CPU half, at most 2",
    )
    snapshot_tokens: int = Field(
        512, ge=16, multiple_of=16, description="Tokens between two snapshots of a large recurrent state"
    )
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of prompts that begin alike")
    kv_offload_memory: float | None = Field(
        None, gt=0, description="GiB of host memory for KV blocks that the cache has no room for"
    )
    kv_offload_dir: str | None = Field(
        None, min_length=1, description="Directory for KV blocks that the cache has no room for; survives restarts"
    )
    kv_offload_disk: float | None = Field(
        None, gt=0, description=f"GiB that --kv-offload-dir may take; default: {DEFAULT_DISK_GIB}"
    )
    kv_offload_tier: str | None = Field(
        None, pattern=r"^[\w.]+:\w+$", description="MODULE:FUNCTION that creates a KV offload tier of your own"
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto",
        description="auto serves all that the model can do; generate serves tokens only; pooling serves vectors only",
    )
    pooling_type: Literal["auto", "last", "mean", "cls", "none"] = Field(
        "auto",
        description="Hidden states that make an embedding; auto: as the model's files say; none: one vector per token",
    )
    classifier_from_token: list[str] = Field(
        default_factory=list,
        description="Two tokens whose logits give a decoder's score, such as no,yes for Qwen3-Reranker",
    )
    speculative_config: SpeculativeConfig | None = Field(
        None,
        description="Speculative decoding method: none, ngram, suffix, grammar, mtp, or JSON in vLLM's form, "
        'such as {"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 4}; default: '
        "grammar on a CPU, else none",
    )
    kv_events_config: KVEventsConfig | None = Field(
        None,
        description="JSON of vLLM's KV events, by which routers learn of cached prefixes, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "topic": "kv"}; default: none',
    )
    enable_lora: bool = Field(False, description="Serve LoRA adapters of the model")
    max_loras: int = Field(8, ge=1, le=256, description="Maximum number of adapters in one step")
    max_lora_rank: int = Field(16, ge=1, le=256, description="Maximum rank of an adapter")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="Adapters kept in host memory; default: four times --max-loras"
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="Number of ranks that compute every layer together, each with a part of the weights"
    )
    decode_context_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Ranks that divide each sequence's tokens instead of its KV heads; 1 or the value of "
        "--tensor-parallel-size",
    )
    enable_expert_parallel: bool = Field(
        False, description="With --tensor-parallel-size, give each rank whole experts instead of a part of each"
    )
    one_shot_sums: bool = Field(
        False,
        description="With --tensor-parallel-size on GPUs, sum small tensors with Quire's kernel instead of NCCL",
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=64, description="Number of stages, each a process that computes some of the layers"
    )
    data_parallel_size: int = Field(
        1, ge=1, le=32, description="Number of engines of the same model that share the requests"
    )
    nnodes: int = Field(
        1, ge=1, le=64, description="Number of machines; they share the ranks of --tensor-parallel-size"
    )
    node_rank: int = Field(0, ge=0, le=63, description="Number of this machine; 0 serves, the others compute for it")
    master_addr: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of machine 0, in a private network, at which the other machines join",
    )
    master_port: int = Field(29501, ge=1, le=65535, description="Port of --master-addr")
    nodes_timeout: float = Field(600.0, gt=0, description="Seconds that machines wait for each other at the start")
    threads: int | None = Field(
        None, ge=1, description="CPU threads that compute; default: all that the process may use"
    )
    niceness: int = Field(0, ge=0, le=19, description="Niceness of the engine's process, if it has one of its own")
    engine_heartbeat_timeout: float = Field(
        10.0, gt=0, description="Seconds without a heartbeat after which an engine is ended"
    )
    engine_step_timeout: float = Field(
        120.0, gt=0, description="Seconds without progress in a step after which an engine is ended"
    )
    max_engine_starts: int = Field(5, ge=1, description="Failed starts in a row after which a dead engine is given up")
    scheduling_policy: Literal["priority", "fcfs"] = Field(
        "priority",
        description="priority schedules by the requests' priorities; fcfs ignores them: first come, first served",
    )
    scheduler_cls: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="MODULE:CLASS of a scheduler of your own that orders the waiting requests",
    )
    executor_cls: str | None = Field(
        None, pattern=r"^[\w.]+:\w+$", description="MODULE:CLASS of an executor of your own that runs the batches"
    )
    disable_sliding_window: bool = Field(
        False, description="Limit the context to the smallest sliding window, so that all layers see all of it"
    )
    weights_on_disk: str | None = Field(
        None,
        min_length=1,
        description="Directory for a CPU model's routed experts, or a dense model's layers, which are then read "
        "from disk",
    )
    weights_in_memory: float | None = Field(
        None,
        gt=0,
        description="GiB of memory for the most used of these weights; default: none for experts, half of the "
        "free memory for layers",
    )
    cpu_offload_gb: float = Field(
        0.0,
        ge=0,
        description="GiB of each GPU's layers that stay in host memory and are copied when a step needs them",
    )
    seed: int = Field(0, description="Seed of dummy weights")

    @property
    def online_quantization(self) -> OnlineQuantization | None:
        return self.quantization if self.quantization in get_args(OnlineQuantization) else None  # type: ignore[return-value]

    @property
    def required_checkpoint_quant_method(self) -> str | None:
        """The quant_method that config.json must have; None if any is allowed."""
        quantization = None if self.online_quantization else self.quantization
        return quantization and quantization.removesuffix("_marlin")

    @property
    def has_draft_weights(self) -> bool:
        return self.speculative_config is not None and self.speculative_config.has_weights

    def without_redundant_quantization(self, quant_method: str | None) -> EngineConfig:
        """--quantization fp8 then keeps an fp8 checkpoint as it is."""
        if quant_method is None or quant_method != self.online_quantization or self.load_format == "dummy":
            return self
        return self.model_copy(update={"quantization": None})

    @property
    def uses_context_parallel(self) -> bool:
        return self.decode_context_parallel_size > 1

    @property
    def max_step_tokens(self) -> int:
        return self.max_num_batched_tokens or DEFAULT_STEP_TOKENS

    def with_gpu_default_step_tokens(self, memory: int) -> EngineConfig:
        """`memory`: the GPU's bytes."""
        if self.max_num_batched_tokens is not None or memory < LARGE_GPU_BYTES:
            return self
        return self.model_copy(update={"max_num_batched_tokens": LARGE_GPU_STEP_TOKENS})

    @property
    def world_size(self) -> int:
        """Number of ranks per replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def local_world_size(self) -> int:
        return self.world_size // self.nnodes

    @property
    def max_running_requests(self) -> int:
        return self.max_num_seqs * self.data_parallel_size

    @property
    def kv_disk_gib(self) -> float:
        return DEFAULT_DISK_GIB if self.kv_offload_disk is None else self.kv_offload_disk

    @field_validator("speculative_config", mode="before")
    @classmethod
    def parse_speculative_config(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("{"):
            return {"method": value}
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None

    @field_validator("kv_events_config", mode="before")
    @classmethod
    def parse_kv_events_config(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None

    @field_validator("speculative_config")
    @classmethod
    def drop_redundant_mtp_model(
        cls, value: SpeculativeConfig | None, info: ValidationInfo
    ) -> SpeculativeConfig | None:
        """vLLM's recipes name the served model as mtp's model. Raises ValueError for another model."""
        if value is None or value.method != "mtp" or value.model is None:
            return value
        if value.model != info.data.get("model"):
            raise ValueError(f"model: mtp uses the MTP layer of the served model, not {value.model}")
        return value.model_copy(update={"model": None})

    @field_validator("device", mode="before")
    @classmethod
    def check_device(cls, value: object) -> object:
        if (why := unsupported_device_reason(value)) is not None:
            raise ValueError(f"{why}: it is not served; cpu, cuda, mps and xpu are")
        return value

    @field_validator("max_num_seqs")
    @classmethod
    def clamp_to_max_sequences(cls, value: int) -> int:
        return min(value, MAX_SEQUENCES)

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def parse_gib(cls, value: object) -> object:
        """Accept GiB or, as in vLLM, bytes: 10G or 10000000000. A number above a
        million means bytes, because no machine has so many GiB."""
        if isinstance(value, str) and value[:-1].replace(".", "", 1).isdecimal() and value[-1] in _BYTE_UNITS:
            return float(value[:-1]) * _BYTE_UNITS[value[-1]] / 2**30
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return value
        return number / 2**30 if number > _MAX_GIB else value

    @field_validator("max_model_len", "rope_context", "max_num_batched_tokens", mode="before")
    @classmethod
    def parse_token_count(cls, value: object) -> object:
        """Accept 32k (32,000) and 32K (32,768), like vLLM."""
        if isinstance(value, str) and value[:-1].isdecimal() and value[-1] in _TOKEN_UNITS:
            return int(value[:-1]) * _TOKEN_UNITS[value[-1]]
        return value

    @model_validator(mode="after")
    def check_parallel_sizes(self) -> EngineConfig:
        if self.uses_context_parallel and self.decode_context_parallel_size != self.tensor_parallel_size:
            raise ValueError(
                f"decode_context_parallel_size: all ranks of tensor_parallel_size, {self.tensor_parallel_size}, divide "
                f"the tokens, or none (1), not {self.decode_context_parallel_size} of them"
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank: machine {self.node_rank} is not one of the {self.nnodes} of nnodes, counted from 0"
            )
        if self.nnodes == 1:
            return self
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"nnodes: only ranks can be on several machines so far; {name} is not supported there, use 1"
                )
        if self.tensor_parallel_size % self.nnodes:
            ranks = f"tensor_parallel_size {self.tensor_parallel_size}"
            raise ValueError(f"nnodes: {ranks} cannot be divided evenly among {self.nnodes} machines")
        if self.master_addr in ("0.0.0.0", "::"):
            raise ValueError(
                f"master_addr: other machines cannot reach {self.master_addr}; give machine 0's own address"
            )
        return self
