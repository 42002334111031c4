from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.kernels.kv_quantization import KVScales
from quire.kernels.parameters.activation import ACTIVATION_KINDS, Activation

HERE = Path(__file__).parent
ISAS = {
    "plain": "no vector extensions",
    "avx2": "AVX2",
    "avx2_vnni": "AVX2 with VNNI",
    "avx512": "AVX-512",
    "avx512_vnni": "AVX-512 with VNNI",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512_amx": "AVX-512 with AMX tiles for linears, adapters and attention of 16 bits and fewer",
    "neon_dot": "NEON with dot product",
}
"""In the order of isa.cpp's bits, best last."""

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_INT = ctypes.c_int
_FLOAT = ctypes.c_float


class QuantizedPart(ctypes.Structure):
    """The structures up to LoraLinear mirror exports.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("packed", "factors")],
        *[(name, _INT) for name in ("outs", "bits", "group", "scales", "offsets", "nested")],
        ("table", ctypes.c_uint8 * 16 * 2),
    ]


class QuantizedLinear(ctypes.Structure):
    _fields_ = [
        ("parts", ctypes.POINTER(QuantizedPart)),
        ("order", _POINTER),
        *[(name, _INT) for name in ("count", "block")],
        ("outliers", _FLOAT),
    ]


class KVFormat(ctypes.Structure):
    _fields_ = [("held", _INT), *[(name, _FLOAT) for name in ("key_scale", "value_scale")]]


class Float8Linear(ctypes.Structure):
    _fields_ = [("packed", _POINTER), ("scales", _POINTER), ("block", _INT)]


class PackedLinear(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("weight", "bias")],
        *[(name, _INT) for name in ("in_", "outs", "compressed", "wide")],
        ("quantized", ctypes.POINTER(QuantizedLinear)),
        ("float8", ctypes.POINTER(Float8Linear)),
    ]


class PerHeadLinear(ctypes.Structure):
    _fields_ = [("linears", ctypes.POINTER(PackedLinear)), *[(name, _INT) for name in ("count", "passed")]]


class Routing(ctypes.Structure):
    _fields_ = [
        *[(name, _POINTER) for name in ("correction", "factors")],
        *[
            (name, _INT)
            for name in ("chosen", "weights", "normalized", "groups", "groups_kept", "group_best", "inputs")
        ],
        *[(name, _FLOAT) for name in ("added", "scale", "softcap", "jitter")],
    ]


class MappedByteRange(ctypes.Structure):
    _fields_ = [("begin", _POINTER), ("bytes", _LONG)]


class MappedExperts(ctypes.Structure):
    _fields_ = [
        ("pieces", ctypes.POINTER(MappedByteRange)),
        *[(name, _POINTER) for name in ("starts", "kept", "guessed", "uses", "counts", "next")],
    ]


class Experts(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.POINTER(PackedLinear)) for name in ("router", "gate_up", "down")],
        ("routing", Routing),
        *[(name, _INT) for name in ("count", "first", "held", "float_router")],
        *[(name, _FLOAT) for name in ("alpha", "limit")],
        *[(name, _INT) for name in ("activation", "gelu")],
        ("mapped", ctypes.POINTER(MappedExperts)),
    ]


class LoraPart(ctypes.Structure):
    _fields_ = [("up", _POINTER), *[(name, _INT) for name in ("first", "outs", "first_rank", "rank")]]


class LoraAdapter(ctypes.Structure):
    _fields_ = [("down", _POINTER), ("parts", ctypes.POINTER(LoraPart)), ("count", _INT), ("panels", _INT)]


class LoraLinear(ctypes.Structure):
    _fields_ = [("adapters", ctypes.POINTER(LoraAdapter)), *[(name, _INT) for name in ("slots", "in_", "outs", "wide")]]


class Argument(ctypes.Structure):
    """Argument and Call mirror decoder/recorded.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "value")]


class Call(ctypes.Structure):
    _fields_ = [("kernel", _POINTER), ("arguments", ctypes.POINTER(Argument)), ("count", ctypes.c_int64)]


class Collective(ctypes.Structure):
    _fields_ = [
        ("memory", _POINTER),
        ("capacity", _LONG),
        *[(name, _INT) for name in ("rank", "count", "parent", "spins")],
        ("steps", ctypes.c_uint32),
    ]


_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


def kv_format(cache: Tensor, scales: KVScales) -> KVFormat | None:
    """Return None for a cache in the kernel's dtype."""
    format_number = _KV_FORMATS.get(cache.dtype)
    return None if format_number is None else KVFormat(format_number, scales.key, scales.value)


def view_as_kernel_blocks(cache: Tensor) -> Tensor:
    return cache if cache.ndim == 3 else cache.flatten(0, 1)


def to_ctypes(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument


def relative_bias_stride_and_origin(bias: Tensor | None) -> tuple[int, int]:
    """Return the row stride of AttentionParams.relative_bias, and the column for distance 0. Raises TypeError."""
    if bias is None:
        return 0, 0
    if bias.dtype != torch.float32 or not bias.is_contiguous():
        raise TypeError("a bias must be float32 and contiguous")
    return bias.shape[1], (bias.shape[1] - 15) // 2 - 1


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raises TypeError unless sinks are contiguous float32, one per head."""
    if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous() or len(sinks) != heads):
        raise TypeError(f"sinks must be float32 and contiguous, one for each of {heads} heads")


def activation_arguments(activation: Activation) -> tuple[int, float, float, float]:
    return (
        ACTIVATION_KINDS.index(activation.kind),
        activation.positive_alpha,
        activation.negative_alpha,
        activation.slope,
    )


_HUGE_PAGE_BYTES, _CHUNK_BYTES = 2 << 20, 32 << 20


class WeightArena:
    """Memory for weights, on huge pages if available, because page table walks of 4 KB pages slow weight streaming by
    up to a third. Tensors share large mappings.
    """

    def __init__(self) -> None:
        self._free_bytes = torch.empty(0, dtype=torch.uint8)

    def allocate_bytes(self, size: int) -> Tensor:
        """Return [size] uint8, aligned to 64 bytes, uninitialized."""
        rounded = -(-size // 64) * 64
        if rounded > len(self._free_bytes):
            self._free_bytes = _map_huge_pages(max(_CHUNK_BYTES, -(-rounded // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES))
        piece, self._free_bytes = self._free_bytes[:size], self._free_bytes[rounded:]
        return piece


def _map_huge_pages(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[begin : begin + size]


SIGNATURES = {
    "paged_attention": [
        *[_POINTER] * 8,
        *[_LONG] * 4,
        *[_INT] * 4,
        _FLOAT,
        _INT,
        _FLOAT,
        _INT,
        _POINTER,
        _LONG,
        _LONG,
        _POINTER,
        _INT,
        _INT,
    ],
    "ranks_attention": [
        *[_POINTER] * 9,
        *[_LONG] * 4,
        *[_INT] * 4,
        _FLOAT,
        _INT,
        _FLOAT,
        _POINTER,
        _LONG,
        _LONG,
        _POINTER,
        _INT,
        _INT,
    ],
    "sparse_attention": [*[_POINTER] * 7, *[_LONG] * 3, *[_INT] * 3, _FLOAT, *[_INT] * 3],
    "select_keys": [
        *[_POINTER] * 6,
        _INT,
        *[_POINTER] * 3,
        _LONG,
        *[_POINTER] * 3,
        _LONG,
        _POINTER,
        *[_LONG] * 2,
        *[_INT] * 5,
        _FLOAT,
        _INT,
    ],
    "latent_store": [*[_POINTER] * 4, _INT, *[_POINTER] * 4, *[_LONG] * 3, *[_INT] * 3, _FLOAT, _INT],
    "linear_blocks": [*[_POINTER] * 3, _LONG, _INT],
    "store_kv": [*[_POINTER] * 6, *[_LONG] * 4, _INT, _INT],
    "rope_store": [*[_POINTER] * 6, *[_INT] * 2, *[_POINTER] * 6, *[_LONG] * 4, *[_INT] * 3, _FLOAT, _INT],
    "short_conv": [*[_POINTER] * 9, _LONG, _POINTER, *[_LONG] * 2, *[_INT] * 6],
    "delta_rule": [*[_POINTER] * 14, _LONG, *[_INT] * 6, _FLOAT, *[_INT] * 3],
    "state_space": [*[_POINTER] * 15, _LONG, *[_INT] * 6, *[_FLOAT] * 3, *[_INT] * 2],
    "selective_scan": [*[_POINTER] * 16, _LONG, *[_INT] * 6, _FLOAT, _INT],
    "join": [*[_POINTER] * 3, _LONG, *[_INT] * 3],
    "cast": [*[_POINTER] * 2, _LONG, _INT],
    "sigmoid_mul": [*[_POINTER] * 2, _LONG, _INT, _INT],
    "rms_norm": [*[_POINTER] * 3, _LONG, _INT, _FLOAT, _INT],
    "add_rms_norm": [*[_POINTER] * 3, _LONG, _INT, _FLOAT, _INT],
    "layer_norm": [*[_POINTER] * 5, _LONG, _INT, _FLOAT, _INT],
    "add": [*[_POINTER] * 2, _LONG, _INT],
    "add_gated": [*[_POINTER] * 3, _LONG, *[_INT] * 2],
    "activate": [_POINTER, _LONG, _INT, *[_FLOAT] * 3, _INT],
    "silu_mul": [*[_POINTER] * 2, _LONG, _INT, _INT],
    "gelu_mul": [*[_POINTER] * 2, _LONG, _INT, _INT],
    "mul_columns": [*[_POINTER] * 2, _LONG, *[_INT] * 4],
    "clamped_mul": [*[_POINTER] * 2, _LONG, _INT, _FLOAT, _FLOAT, _INT],
    "mix_experts": [*[_POINTER] * 4, _LONG, _INT],
    "pack_linear": [*[_POINTER] * 2, _INT, _INT, _INT],
    "linear": [*[_POINTER] * 3, _LONG, _INT, _POINTER],
    "add_adapters": [*[_POINTER] * 4, _LONG, _INT],
    "look_up": [*[_POINTER] * 3, _LONG],
    "fit_int4": [*[_POINTER] * 4, _LONG, _INT, _INT],
    "run_calls": [_POINTER, _INT, _POINTER, _LONG, _INT, _LONG],
    "sum_ranks": [*[_POINTER] * 2, _LONG, _INT],
}
"""Argument types of the kernels that exist once per dtype."""
_UNTYPED_SIGNATURES = {
    "compressed_size": [_POINTER, *[_INT] * 3],
    "compress": [_POINTER, _POINTER, *[_INT] * 3],
    "quantized_size": [_POINTER, _INT],
    "pack_quantized": [*[_POINTER] * 5, *[_INT] * 3],
    "pack_float8": [*[_POINTER] * 2, *[_INT] * 3],
    "argmax_f32": [_POINTER, _POINTER, _LONG, _LONG, _INT],
    "draw_f32": [*[_POINTER] * 4, _LONG, _LONG, _INT],
    "gather_ranks": [*[_POINTER] * 3, _LONG, _POINTER],
    "share_rank": [*[_POINTER] * 2, _LONG],
}
"""compressed_size returns the bytes of a compressed bfloat16 matrix, or 0 if compression is unsupported or makes it no
smaller (compress12.h).
"""
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NativeLibrary:
    """Kernels are attributes: dicts from dtype to C function, or single functions."""

    if TYPE_CHECKING:

        def __getattr__(self, kernel: str) -> Any: ...

    def __init__(self, isa: str, weight_arena: WeightArena | None = None) -> None:
        """Raises OSError if the library cannot be loaded or was built from other sources."""
        self.isa, self.weight_arena = isa, WeightArena() if weight_arena is None else weight_arena
        library = self._library = ctypes.CDLL(str(HERE / f"{isa}.so"))
        sources = sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.h")])
        library.sum_of_sources.restype = ctypes.c_uint32
        if sources and library.sum_of_sources() != zlib.crc32(b"".join(path.read_bytes() for path in sources)):
            raise OSError("they were built from other sources; install Quire again, as `make` does")
        for name, arguments in SIGNATURES.items():
            setattr(
                self,
                name,
                {dtype: self._bind_function(f"{name}_{suffix}", arguments) for dtype, suffix in _SUFFIXES.items()},
            )
        for name, arguments in _UNTYPED_SIGNATURES.items():
            setattr(self, name.removesuffix("_f32"), self._bind_function(name, arguments))

    def _bind_function(self, name: str, arguments: list[Any]) -> Callable[..., int]:
        function: Any = getattr(self._library, name)
        function.argtypes, function.restype = arguments, _LONG if name.endswith("_size") else _INT
        return function

    def call_wrapper_address(self, kernel: str, dtype: torch.dtype) -> int | None:
        return ctypes.cast(getattr(self._library, f"call_{kernel}_{_SUFFIXES[dtype]}"), _POINTER).value


def load_library_or_reason() -> NativeLibrary | str:
    try:
        isas = loadable_isas()
        missing = "the C++ kernels were not built; install a C++ compiler such as g++, then Quire again"
        return NativeLibrary(isas[-1]) if isas else missing
    except (OSError, AttributeError) as error:  # built for another machine or version
        return f"the C++ kernels cannot be loaded: {error}"


def loadable_isas() -> list[str]:
    """Return the instruction sets that are built and supported by this CPU, best last. If QUIRE_CPU_ISA is set, no
    better set than the one that it names is returned. Raises ValueError if that set is unknown or unusable.
    """
    built = [isa for isa in ISAS if (HERE / f"{isa}.so").exists()]
    if "plain" not in built:
        return []
    usable = [isa for isa in _cpu_supported_isas() if isa in built]
    wanted = os.environ.get("QUIRE_CPU_ISA", "")
    if not wanted:
        return usable
    if wanted not in ISAS:
        raise ValueError(f"QUIRE_CPU_ISA={wanted!r} is not one of {', '.join(ISAS)}")
    if wanted not in usable:
        raise ValueError(f"QUIRE_CPU_ISA={wanted} cannot run here; these can: {', '.join(usable)}")
    return usable[: usable.index(wanted) + 1]


def best_unbuilt_isa() -> str | None:
    best = _cpu_supported_isas()[-1]
    return None if (HERE / f"{best}.so").exists() else best


def is_amx_refused() -> bool:
    """True if the OS denies this process the CPU's AMX tiles."""
    return bool(ctypes.CDLL(str(HERE / "plain.so")).tiles_refused())


def _cpu_supported_isas() -> list[str]:
    """Return the sets that this CPU supports, built or not, best last. Needs the plain library."""
    bits = ctypes.CDLL(str(HERE / "plain.so")).usable_isas()
    return [isa for index, isa in enumerate(ISAS) if bits >> index & 1]
