from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import UnquantizedScheme
from quire.kernels.backend import NO_ADAPTERS, Backend

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
}


class PoolerHead:
    """Maps [R, hidden] to [R, size], in float32."""

    def __init__(self, layer_specs: Sequence[HeadLayerSpec], backend: Backend) -> None:
        self._layer_specs = layer_specs
        scheme = UnquantizedScheme(backend, torch.float32)
        self._linears = [
            FusedLinear(scheme, each.in_features, {each.name: each.out_features}, bias=each.bias)
            for each in layer_specs
        ]
        self._norms = [
            None if each.norm is None else LayerNormWeights(each.norm, each.out_features, bias=each.norm_bias)
            for each in layer_specs
        ]

    def parameters(self) -> ParameterTable:
        return merge_parameters(*self._linears, *self._norms)

    def __call__(self, pooled: Tensor) -> Tensor:
        x = pooled.float()
        for layer, linear, norm in zip(self._layer_specs, self._linears, self._norms, strict=True):
            x = _ACTIVATIONS[layer.activation](linear.packed_linear(x, NO_ADAPTERS))
            if norm is not None:
                x = F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, layer.eps)
        return x
