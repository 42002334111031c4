from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Linear, QuantizedEmbedding
from quire.kernels.cpu import linear, native_library
from quire.kernels.cpu.linears import quantized_linear
from quire.kernels.cpu.mla.per_head_linear import make_compiled_per_head_linear
from quire.kernels.cpu.quantization import float8_linear
from quire.kernels.mla.per_head_linear import ReferencePerHeadLinear
from quire.kernels.quantized_tensors import QuantizedWeight
from quire.kernels.reference import ReferenceBackend

_MAX_EXPERTS = 1024


class CpuLinearBackend(ReferenceBackend):
    keeps_weights_quantized = True
    library: native_library.NativeLibrary

    def __init__(
        self, library: native_library.NativeLibrary | None, *, deterministic: bool, activation_bits: str
    ) -> None:
        super().__init__(deterministic=deterministic)
        self.activation_bits = activation_bits
        loaded_library = native_library.load_library_or_reason() if library is None else library
        self.missing_reason = loaded_library if isinstance(loaded_library, str) else None
        if not isinstance(loaded_library, str):
            self.library = loaded_library

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """Use our batch-invariant kernel (linear.cpp), except for float32 with the plain and avx2 sets.

        On one Zen 4 core it is 1.5 to 3 times as fast as oneDNN with packed weights for one row, 1.1 times for 32, and
        equally fast from 128 on. For bfloat16 oneDNN takes 3 times as long on AVX-512 without bf16, and cannot pack on
        AVX2. For float32 on AVX2 oneDNN is faster from a few rows on. Routers still use our kernel, because a compiled
        MoE calls it.
        """
        router = wide and weight.dtype in self.library.linear and len(weight) <= _MAX_EXPERTS
        if not (router or self.prefers_native_linear(weight.dtype)) or weight.shape[1] * weight.element_size() % 4:
            return super().pack_linear(weight, bias, wide=wide)
        return linear.PackedLinear(self.library, weight, bias, wide=wide)

    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        linears = [self.pack_linear(each, None) for each in weights]
        return make_compiled_per_head_linear(self.library, linears, passthrough_dim) or ReferencePerHeadLinear(
            linears, passthrough_dim
        )

    def prefers_native_linear(self, dtype: torch.dtype) -> bool:
        """True if our kernel serves unquantized linears, as record_layers requires."""
        narrow = dtype == torch.float32 and self.library.isa in ("plain", "avx2")
        return dtype in self.library.linear and not (narrow and torch.backends.mkldnn.is_available())

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        """Use integer products, or bfloat16 products for float8. Weights are dequantized if groups are not multiples of
        16 inputs, if input orders differ, if float8 and integer weights are mixed, or if the scales of float8 weights
        cover different numbers of inputs or no multiple of 4.
        """
        if dtype not in self.library.linear:
            return super().pack_quantized(weights, bias, dtype=dtype, wide=wide)
        if (floats := float8_linear.as_float8_weights(weights)) is not None:
            return float8_linear.Float8Linear(self.library, floats, bias, dtype=dtype, wide=wide)
        if (grouped := quantized_linear.as_grouped_weights(weights)) is None:
            return super().pack_quantized(weights, bias, dtype=dtype, wide=wide)
        return quantized_linear.CompiledQuantizedLinear(
            self.library, grouped, bias, dtype=dtype, wide=wide, activation_bits=self.activation_bits
        )

    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        grouped = quantized_linear.as_grouped_weights([weight])
        if grouped is None or dtype not in self.library.linear:
            return super().pack_quantized_embedding(weight, dtype=dtype, tied=tied)
        linear = quantized_linear.CompiledQuantizedLinear(
            self.library, grouped, None, dtype=dtype, wide=True, activation_bits=self.activation_bits
        )
        return QuantizedEmbedding(linear.look_up_rows, linear if tied else None)
