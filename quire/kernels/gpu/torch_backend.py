from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AdapterSlotSpec, Linear, LinearWithLora
from quire.kernels.reference import ReferenceBackend


class TorchBackend(ReferenceBackend):
    """The reference on a GPU, with Triton where PyTorch does not suffice. Triton is imported only when needed, because
    the import takes a second and some platforms lack Triton.
    """

    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.deterministic if device.type == "cuda" else super().is_batch_invariant(device, dtype)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        if not self.deterministic:
            return super().pack_linear(weight, bias, wide=wide)
        from quire.kernels.gpu.linears.triton_linear import pack_linear

        return pack_linear(weight, bias, wide=wide)

    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        if slots.device.type == "cpu":
            return super().make_linear_with_lora(linear, slots)
        try:
            from quire.kernels.gpu.linears.triton_lora import TritonLinearWithLora
        except ModuleNotFoundError:
            raise ValueError("on a GPU adapters need Triton (pip install triton)") from None
        return TritonLinearWithLora(linear, slots)
