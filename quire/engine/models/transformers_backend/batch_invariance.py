"""Makes elementwise functions compute each row independently of other rows.

On CPUs, PyTorch computes a tail shorter than a vector with other instructions, which round differently. It also splits
large tensors among threads at any element. Therefore rows are padded to whole vectors, and chunks are small enough for
one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.kernels.backend import Backend
from quire.kernels.parameters.activation import GELU, Activation

_VECTOR_SIZE = 64
"""This many elements fill whole vectors in every dtype on every CPU."""
_SINGLE_THREAD_SIZE = 1 << 15
"""Up to this size PyTorch uses one thread (at::internal::GRAIN_SIZE)."""
_ELEMENTWISE = {
    torch.sigmoid,
    torch.Tensor.sigmoid,
    F.sigmoid,
    torch.tanh,
    torch.Tensor.tanh,
    F.tanh,
    F.softplus,
    torch.exp,
    torch.Tensor.exp,
    F.mish,
    F.elu,
    F.logsigmoid,
    torch.nn.functional.silu,
    F.gelu,
    F.relu6,
    F.hardswish,
}


_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)
_HANDLED = _ELEMENTWISE.union(_SOFTMAX)


class BatchInvariantOps(TorchFunctionMode):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HANDLED or not isinstance(args[0], Tensor) or kwargs.get("inplace") or not args[0].ndim:
            return func(*args, **kwargs)
        x = args[0]
        if func in _SOFTMAX:
            return self._padded_softmax(func, x, args[1:], kwargs)
        rows = x.reshape(-1, x.shape[-1])
        if len(args) == 1 and (output := self._run_kernel(func, rows, kwargs)) is not None:
            return output.view(x.shape)
        padded = F.pad(rows, (0, -x.shape[-1] % _VECTOR_SIZE))
        rows_per_block = max(_SINGLE_THREAD_SIZE // padded.shape[1], 1)
        parts = [func(part.contiguous(), *args[1:], **kwargs) for part in padded.split(rows_per_block)]
        output = parts[0] if len(parts) == 1 else torch.cat(parts)
        return output[:, : x.shape[-1]].reshape(x.shape)

    @staticmethod
    def _padded_softmax(func: Any, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        dim = kwargs.get("dim", args[0] if args else None)
        num_padding = -x.shape[-1] % _VECTOR_SIZE
        if dim not in (-1, x.ndim - 1) or not num_padding or not x.is_floating_point():
            return func(x, *args, **kwargs)
        return func(F.pad(x, (0, num_padding), value=-torch.inf), *args, **kwargs)[..., : x.shape[-1]].contiguous()

    def _run_kernel(self, func: Any, rows: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        if self._backend.unsupported_reason(rows.device, rows.dtype, 2) is not None or rows.shape[1] % _VECTOR_SIZE:
            return None
        if func is F.silu:
            return self._backend.silu_mul(torch.cat((rows, torch.ones_like(rows)), dim=1))
        if func is F.gelu:
            tanh = kwargs.get("approximate") == "tanh"
            return self._backend.apply_activation(rows.clone(), Activation("gelu_tanh") if tanh else GELU)
        return None
