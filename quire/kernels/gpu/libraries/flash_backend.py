"""Base of the flash-attn backends. Pages are [page, token, KV head, head_dim]."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend, Linear, QuantizedEmbedding
from quire.kernels.gpu.prefill_decode_split import PagedAttentionBackend
from quire.kernels.gpu.torch_backend import TorchBackend
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import QuantizedWeight
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import MoE, MoEComponents

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256


class FlashPagedBackend(PagedAttentionBackend):
    block_size = 256
    """flash-attn 2 requires multiples of 256."""
    cuda_graph_support = "steps"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self.reference: Backend = ReferenceBackend()
        self.fused_ops = _make_fused_backend(deterministic=deterministic)
        self.keeps_weights_quantized = self.fused_ops.keeps_weights_quantized

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cuda":
            return f"runs on NVIDIA GPUs, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float16 and bfloat16, not {dtype}"
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"takes head sizes up to {_MAX_HEAD_DIM} in steps of 8, not {head_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs compute capability 8.0, this GPU has {major}.{minor}"

    def unsupported_kv_dtype_reason(self, kv_dtype: torch.dtype) -> str | None:
        return "keeps keys and values in the model's type; --attention-backend triton keeps them in 8 bits"

    def unsupported_attention_reason(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        if sinks:
            return "has no attention sinks"
        if chunks:
            return "has no chunked attention; --attention-backend triton has it"
        return "has no MLA" if latents else None

    def make_context_parallel_backend(self, ranks: int) -> None:
        return None

    def chunked_recurrence_backend(self) -> Backend | None:
        return self.fused_ops.chunked_recurrence_backend()

    def _ops_for(self, x: Tensor) -> Backend:
        return self.fused_ops if x.is_cuda else self.reference

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops_for(x).rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._ops_for(x).add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._ops_for(x).layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._ops_for(x).add_layer_norm(x, residual, weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._ops_for(gate_up).silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._ops_for(gate_up).gelu_mul(gate_up)

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        self._ops_for(k).store_kv(k, v, k_cache, v_cache, slots, scales)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._ops_for(qkv).rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        return self._ops_for(bcx).short_conv(bcx, conv, columns, metadata)

    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self._ops_for(inputs).run_recurrence(inputs, z, head_inputs, rule, states, metadata)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        return self._ops_for(weight).pack_linear(weight, bias, wide=wide)

    def stacks_experts(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.fused_ops.stacks_experts(device, dtype)

    def make_moe(self, experts: MoEComponents) -> MoE:
        return self.fused_ops.make_moe(experts)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        return self._ops_for(weights[0].codes).pack_quantized(weights, bias, dtype=dtype, wide=wide)

    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        return self._ops_for(weight.codes).pack_quantized_embedding(weight, dtype=dtype, tied=tied)


class FlashLibraryBackend(FlashPagedBackend):
    package = ""
    compute_majors: tuple[int, ...] = ()
    """() means those of flash-attn 2."""
    batch_variance_reason = ""
    """Why a row's bits depend on the batch even if deterministic, or "" if they do not."""

    def __init__(self, library: Any, *, deterministic: bool = False) -> None:
        """`library` is the module, or text that says why it is unusable."""
        super().__init__(deterministic=deterministic)
        self._missing_reason = library if isinstance(library, str) else None
        self._library = library

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if (reason := super().unsupported_reason(device, dtype, head_dim, softcap)) is not None:
            return reason
        if self.compute_majors and (reason := unsupported_architecture_reason(device, self.compute_majors)) is not None:
            return reason
        if self._missing_reason is None and self.deterministic and self.batch_variance_reason:
            return f"{self.batch_variance_reason}, so --deterministic takes another backend"
        return self._missing_reason

    def description(self) -> str:
        try:
            return f"flash-attn {version(self.package)}"
        except PackageNotFoundError:
            return f"flash-attn {self.name.removeprefix('flash')}, version unknown"


def import_library(name: str, what: str, install: str) -> ModuleType | str:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            return f"{what} cannot be loaded, it lacks {error.name}"
        return f"{what} is not installed ({install})"
    except (ImportError, OSError) as error:
        return f"{what} cannot be loaded, install it for this PyTorch ({str(error).splitlines()[0]})"


def gather_step_kv(cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Return the keys or values [T, K, D] of the step's tokens."""
    return cache.flatten(0, 1)[metadata.slot_mapping]


def unsupported_architecture_reason(device: torch.device, majors: tuple[int, ...]) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if major in majors:
        return None
    return f"needs compute capability {' or '.join(f'{each}.x' for each in majors)}, this GPU has {major}.{minor}"


def has_code_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """True if code for `architectures`, such as "sm_90" or "compute_120" in `torch.cuda.get_arch_list`, runs on
    `capability`. Machine code ("sm") runs on GPUs of the same major version with at least its minor version. PTX
    ("compute") also runs on all later GPUs. Suffix "a" limits code to one version, "f" to one major version.
    """
    for kind, major, minor, suffix in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(architectures)):
        target = (int(major), int(minor))
        same_major = target[0] == capability[0] and target <= capability
        if (
            target == capability
            or (same_major and suffix != "a")
            or (target <= capability and (kind, suffix) == ("compute", ""))
        ):
            return True
    return False


def _make_fused_backend(*, deterministic: bool) -> Backend:
    try:
        from quire.kernels.gpu.triton_backend import TritonBackend
    except ModuleNotFoundError:
        return TorchBackend(deterministic=deterministic)
    return TritonBackend(deterministic=deterministic)
