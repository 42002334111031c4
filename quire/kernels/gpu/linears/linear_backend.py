from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Linear, QuantizedEmbedding
from quire.kernels.gpu.experts import grouped_matmul
from quire.kernels.gpu.experts.grouped_moe import make_grouped_moe
from quire.kernels.gpu.linears.triton_linear import DenseLinear
from quire.kernels.gpu.mla.triton_per_head_linear import TritonPerHeadLinear
from quire.kernels.gpu.prefill_decode_split import PagedAttentionBackend
from quire.kernels.gpu.quantization import quantized_linear
from quire.kernels.quantized_tensors import QuantizedWeight
from quire.kernels.routing import MoE, MoEComponents


class TritonLinearBackend(PagedAttentionBackend):
    keeps_weights_quantized = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        weight = weight.contiguous()
        return DenseLinear(weight, bias, wide, super().pack_linear(weight, bias, wide=wide))

    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        return TritonPerHeadLinear(weights, passthrough_dim, fixed=self.deterministic)

    def stacks_experts(self, device: torch.device, dtype: torch.dtype) -> bool:
        return not self.deterministic and grouped_matmul.is_supported(device, dtype)

    def make_moe(self, experts: MoEComponents) -> MoE:
        return make_grouped_moe(self, experts, fixed=self.deterministic) or super().make_moe(experts)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        packed = quantized_linear.pack_quantized(weights, bias, dtype=dtype, wide=wide, fixed=self.deterministic)
        return super().pack_quantized(weights, bias, dtype=dtype, wide=wide) if packed is None else packed

    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        packed = quantized_linear.pack_quantized_embedding(weight, dtype=dtype, tied=tied, fixed=self.deterministic)
        return super().pack_quantized_embedding(weight, dtype=dtype, tied=tied) if packed is None else packed
