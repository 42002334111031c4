"""How an engine is set up: one frozen model, which engine/settings.py fills."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEMO_MODEL = str(Path(__file__).resolve().parent.parent / "configs" / "demo")
"""The embedded model."""

_UNITS = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
Dtype = Literal["auto", "bfloat16", "float16", "float32"]


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
