from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from quire.engine.common.speculative_keys import IGNORED_VLLM_KEYS, UNSUPPORTED_DRAFT_METHODS


def _parse_json_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse_json_object)]


def _normalize_dtype(value: Any) -> Any:
    return {"half": "float16", "float": "float32"}.get(value, value) if isinstance(value, str) else value


def normalize_quantization(value: Any) -> Any:
    """Raises ValueError for names of unsupported devices."""
    if (why := unsupported_device_reason(value)) is not None:
        raise ValueError(f"{why}: give a checkpoint in another format")
    return _QUANTIZATION_ALIASES.get(value, value) if isinstance(value, str) else value


_QUANTIZATION_ALIASES = {
    "int8_per_channel_weight_only": "int8",
    "int8_per_channel": "int8",
    "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
    "auto_gptq": "gptq",
    "auto_awq": "awq",
    "fp8_per_channel": "fp8",
}
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_normalize_dtype)]


OnlineQuantization = Literal["int8", "int4", "fp8"]
CheckpointQuantization = Literal[
    "gptq", "gptq_marlin", "awq", "awq_marlin", "compressed-tensors", "bitsandbytes", "mxfp4", "modelopt", "gguf"
]
"""vLLM's names of checkpoint formats and of kernels."""


_ZMQ_ENDPOINT = r"^(tcp://[^\s/]+:[0-9]{1,5}|ipc://\S+)$"


class KVEventsConfig(BaseModel):
    """Settings of KV cache events, with vLLM's names and defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """None means "zmq". Nothing is published unless enable_kv_cache_events is set."""
    endpoint: str = Field("tcp://*:5557", pattern=_ZMQ_ENDPOINT)
    """Everyone who can connect to the endpoint can read the token ids of prompts. Replica n adds n to the port."""
    replay_endpoint: str | None = Field(None, pattern=_ZMQ_ENDPOINT)
    buffer_steps: int = Field(10_000, ge=1)
    """Number of batches that are stored for subscribers that missed some."""
    hwm: int = Field(100_000, ge=1)
    max_queue_size: int = Field(100_000, ge=1)
    topic: str = ""
    data_parallel_rank: int | None = Field(None, ge=0)

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def for_replica(self, index: int) -> KVEventsConfig:
        endpoints = {
            name: _endpoint_of_replica(endpoint, index)
            for name, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint))
            if endpoint is not None
        }
        return self.model_copy(update={"data_parallel_rank": index, **endpoints})


def _endpoint_of_replica(endpoint: str, index: int) -> str:
    """Endpoints get numbers as in vLLM."""
    base, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:"):
        return f"{base}{colon}{int(port) + index}"
    return f"{endpoint}_dp{index}" if index else endpoint


LookupMethod = Literal["ngram", "suffix"]
DEFAULT_LOOKUP_TOKENS = 8


class SpeculativeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["none", "ngram", "suffix", "grammar", "draft_model", "eagle", "eagle3", "medusa", "mtp"]
    """ngram searches the request's own tokens; suffix also searches recent answers with the same cache salt. grammar
    drafts only what a grammar forces, which all other methods except none draft too.
    """
    model: str | None = None
    """Local directory or hub id of a smaller model with the same vocabulary, or of draft heads."""
    num_speculative_tokens: int = Field(8, ge=1, le=32)
    """Maximum per sequence and step."""
    prompt_lookup_min: int = Field(1, ge=1, le=32)
    """Minimum number of tokens that must match."""
    lookup: LookupMethod | None = None
    """Continues the drafts of a model or heads, or drafts alone where its tokens are accepted as often."""
    num_lookup_tokens: int | None = Field(None, ge=1, le=32)
    """Number of draft tokens that `lookup` may add to num_speculative_tokens; None means DEFAULT_LOOKUP_TOKENS."""

    @model_validator(mode="before")
    @classmethod
    def normalize_vllm_keys(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        settings = {name: each for name, each in value.items() if name not in IGNORED_VLLM_KEYS}
        method = settings.get("method")
        if method is None and settings.get("model") is not None:
            settings["method"] = infer_draft_method_from_name(str(settings["model"]))
        if method in UNSUPPORTED_DRAFT_METHODS:
            return {"method": "none"}
        return settings

    @field_validator("method", mode="before")
    @classmethod
    def normalize_mtp_method(cls, value: object) -> object:
        return "mtp" if isinstance(value, str) and value.endswith("_mtp") else value

    @property
    def uses_hidden_states(self) -> bool:
        return self.method in ("eagle", "eagle3", "medusa", "mtp")

    @property
    def has_weights(self) -> bool:
        return self.method == "draft_model" or self.uses_hidden_states

    @property
    def max_draft_tokens(self) -> int:
        if self.method == "none":
            return 0
        num_lookup_tokens = 0 if self.lookup is None else self.num_lookup_tokens or DEFAULT_LOOKUP_TOKENS
        return self.num_speculative_tokens + num_lookup_tokens

    @model_validator(mode="after")
    def check_lookup(self) -> SpeculativeConfig:
        if self.lookup is not None and not self.has_weights:
            raise ValueError(
                f"lookup continues the drafts of draft_model, eagle, eagle3, medusa and mtp; {self.method!r} takes none"
            )
        if self.lookup is None and self.num_lookup_tokens is not None:
            raise ValueError("num_lookup_tokens needs lookup, which is ngram or suffix")
        return self

    @model_validator(mode="after")
    def check_model(self) -> SpeculativeConfig:
        if self.method == "mtp":
            return self
        if self.has_weights != (self.model is not None):
            raise ValueError("draft_model, eagle, eagle3 and medusa need a model; other methods take none")
        return self


def infer_draft_method_from_name(model: str) -> str:
    """Infer the method by vLLM's rules."""
    name = model.lower()
    return next((method for method in ("eagle3", "eagle", "medusa") if method in name), "draft_model")


_UNSUPPORTED_DEVICES = {
    "xla": "XLA recompiles for each new shape, and a server's steps have ever new shapes",
    "tpu": "TPUs compute through XLA, which recompiles for each new shape, and a server's steps have ever new shapes",
    "npu": "Ascend's NPUs need a PyTorch of their own, for which there are no kernels here",
    "ascend": "Ascend's NPUs need a PyTorch of their own, for which there are no kernels here",
    "hpu": "Gaudi HPUs recompile for each new shape, as TPUs do",
    "neuron": "Neuron's cores run models that were compiled ahead for fixed shapes",
    "openvino": "OpenVINO runs graphs of its own, not PyTorch's modules",
    "qaic": "Cloud AI's cards run models that were compiled ahead for fixed shapes",
}


def unsupported_device_reason(name: object) -> str | None:
    """None if the device is supported or unknown."""
    return _UNSUPPORTED_DEVICES.get(name.partition(":")[0]) if isinstance(name, str) else None
