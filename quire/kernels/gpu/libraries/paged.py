"""What the backends on flash-attn's kernels share: large pages, laid out [page, token, KV head, head_dim], and
everything beside attention: Triton's fused kernels on a GPU, where Triton is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend, Linear, Table
from quire.kernels.gpu.mixed import PagedAttention
from quire.kernels.kv_codes import UNSCALED, KVScales
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.reference import Reference
from quire.kernels.rotation import Rope
from quire.kernels.routing import Experts, Mixture

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM = 256


class FlashPages(PagedAttention):
    block_size = 256
    """flash-attn 2 takes multiples of 256 alone."""
    in_graphs = "steps"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self.plain: Backend = Reference()
        """Computes everything besides attention for tensors that are not on a GPU,"""
        self.fused = _fused(deterministic=deterministic)
        """and for those that are."""
        self.keeps_bits = self.fused.keeps_bits

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """What flash-attn 2's kernels ask of a model and a GPU, whoever built them."""
        if device.type != "cuda":
            return f"runs on NVIDIA GPUs, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float16 and bfloat16, not {dtype}"
        if head_dim % 8 or head_dim > _MOST_HEAD_DIM:
            return f"takes head sizes up to {_MOST_HEAD_DIM} in steps of 8, not {head_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs compute capability 8.0, this GPU has {major}.{minor}"

    def cannot_hold(self, kv_dtype: torch.dtype) -> str | None:
        return "keeps keys and values in the model's type; --attention-backend triton holds them in 8 bits"

    def cannot_attend(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        if sinks:
            return "has no sinks of attention"
        if chunks:
            return "has no attention within chunks; --attention-backend triton has it"
        return "has no attention over latents" if latents else None

    def divided(self, ranks: int) -> None:
        return None

    def _for(self, x: Tensor) -> Backend:
        return self.fused if x.is_cuda else self.plain

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._for(x).rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._for(x).add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return self._for(x).layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._for(x).add_layer_norm(x, residual, weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._for(gate_up).silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._for(gate_up).gelu_mul(gate_up)

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
    ) -> None:
        self._for(k).store_kv(k, v, k_cache, v_cache, slots, scales)

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._for(qkv).rope_store(qkv, rope, k_cache, v_cache, metadata)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
        return self._for(bcx).short_conv(bcx, conv, columns, metadata)

    def recur(
        self, given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, metadata: AttentionMetadata
    ) -> Tensor:
        return self._for(given).recur(given, z, beside, rule, states, metadata)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        return self._for(weight).pack_linear(weight, bias, wide=wide)

    def mixture(self, experts: Experts) -> Mixture:
        return self.fused.mixture(experts)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        return self._for(weights[0].codes).pack_quantized(weights, bias, dtype=dtype, wide=wide)

    def pack_table(self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool) -> Table:
        return self._for(weight.codes).pack_table(weight, dtype=dtype, tied=tied)


class FlashLibrary(FlashPages):
    """On a library, which may be missing."""

    package = ""
    """What pip calls it."""
    majors: tuple[int, ...] = ()
    """The major versions of the compute capability that it is made for; (): no less than FlashPages asks for."""
    by_batch = ""
    """Why a row's bits depend on the batch; "": they need not."""

    def __init__(self, found: Any, *, deterministic: bool = False) -> None:
        """`found`: the library, or why it cannot be used."""
        super().__init__(deterministic=deterministic)
        self._missing = found if isinstance(found, str) else None
        self._library = found

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if (reason := super().cannot_serve(device, dtype, head_dim, softcap)) is not None:
            return reason
        if self.majors and (reason := architecture_fault(device, self.majors)) is not None:
            return reason
        if self._missing is None and self.deterministic and self.by_batch:
            return f"{self.by_batch}, so --deterministic takes another backend"
        return self._missing

    def description(self) -> str:
        try:
            return f"flash-attn {version(self.package)}"
        except PackageNotFoundError:
            return f"flash-attn {self.name.removeprefix('flash')}, version unknown"


def loaded(name: str, what: str, install: str) -> ModuleType | str:
    """A library's module, or why it cannot be used. what: the library, for messages."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            return f"{what} cannot be loaded, it lacks {error.name}"
        return f"{what} is not installed ({install})"
    except (ImportError, OSError) as error:  # built for another PyTorch or CUDA
        return f"{what} cannot be loaded, install it for this PyTorch ({str(error).splitlines()[0]})"


def fresh(cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """The keys or values of the step's own tokens [T, K, D], out of their pages."""
    return cache.flatten(0, 1)[metadata.slots]


def architecture_fault(device: torch.device, majors: tuple[int, ...]) -> str | None:
    """Why kernels for these major versions of the compute capability alone do not run there."""
    major, minor = torch.cuda.get_device_capability(device)
    if major in majors:
        return None
    return f"needs compute capability {' or '.join(f'{each}.x' for each in majors)}, this GPU has {major}.{minor}"


def built_for(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Whether code built for these ("sm_90", "compute_120"; as `torch.cuda.get_arch_list`) runs on such a GPU.

    Machine code (sm) runs on its own major version, from its minor version on; PTX (compute) on all later ones. A
    suffix ties code to one version ("a") or to one major version ("f").
    """
    for kind, major, minor, suffix in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(architectures)):
        of = (int(major), int(minor))
        same_major = of[0] == capability[0] and of <= capability
        if (
            of == capability
            or (same_major and suffix != "a")
            or (of <= capability and (kind, suffix) == ("compute", ""))
        ):
            return True
    return False


def _fused(*, deterministic: bool) -> Backend:
    """What computes beside attention on a GPU."""
    try:
        from quire.kernels.gpu.triton_paged import Triton
    except ModuleNotFoundError:  # there is no Triton for this platform
        return Reference(deterministic=deterministic)
    return Triton(deterministic=deterministic)
