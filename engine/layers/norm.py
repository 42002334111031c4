"""The weights of RMSNorms (Zhang and Sennrich, 2019), by the names that a part of a layer gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.engine.layers.parameters import Parameter, ParameterTable


class NormWeights:
    """Loaded weights as kernels take them: float32."""

    def __init__(self, names: dict[str, int], dtype: torch.dtype, *, offset: float) -> None:
        """`names`: name in the checkpoint to size; `offset` is added to each weight (1 for Gemma's)."""
        self._names = names
        self._dtype = dtype
        self._offset = offset
        self._weights: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def get(self, name: str) -> Tensor | None:
        """None for a norm that the model does not have."""
        return self._weights[name] if name in self._names else None

    def parameters(self) -> ParameterTable:
        def parameter(name: str, size: int) -> Parameter:
            def put(tensor: Tensor) -> None:
                self._weights[name] = tensor.float() + self._offset

            return Parameter((size,), self._dtype, put)

        return {f"{name}.weight": parameter(name, size) for name, size in self._names.items()}
