"""float32 weights of RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.engine.architecture.norm import NormSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, make_loadable_parameter
from quire.kernels.backend import Operations
from quire.kernels.quantized_tensors import Activations, choose_rounding_and_needs_unrounded


class NormWeights:
    """Norms by name, with float32 weights."""

    def __init__(self, names: dict[str, int], dtype: torch.dtype, spec: NormSpec) -> None:
        self._sizes_by_name = names
        self._dtype = dtype
        self._spec = spec
        self._weights: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}

    def get_weight(self, name: str) -> Tensor | None:
        return self._weights[name] if name in self._sizes_by_name else None

    def get_bias(self, name: str) -> Tensor | None:
        """Returns None for RMSNorm."""
        return self._biases.get(name)

    def add_and_norm(self, ops: Operations, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual). If no norm has this name, returns x + residual twice. If
        `residual` is None, x takes the place of x + residual. May overwrite x and residual.
        """
        if residual is None:
            return self.apply_norm(ops, name, x), x
        if name not in self._sizes_by_name:
            total = ops.add_residual(x, residual)
            return total, total
        weight, eps = self._weights[name], self._spec.eps
        if self._spec.is_layer_norm:
            return ops.add_layer_norm(x, residual, weight, self._biases[name], eps)
        return ops.add_rms_norm(x, residual, weight, eps)

    def norm_for_linears(
        self,
        linears: Sequence[FusedLinear],
        ops: Operations,
        name: str,
        x: Tensor,
        residual: Tensor | None,
        *,
        parallel: bool = False,
    ) -> tuple[Activations, Tensor]:
        """Quantizes the normed activations, whose only readers are `linears`, to 8 bits if any of them accepts that. If
        another one needs unrounded values, keeps these too. Returns the same as add_and_norm, but with `parallel`
        ignores x and returns (norm(residual), residual).
        """
        if parallel:
            assert residual is not None
            x, residual = residual, None
        rounding = (
            choose_rounding_and_needs_unrounded([each.packed_linear for each in linears], x)
            if name in self._sizes_by_name
            else None
        )
        if rounding is None:
            return self.add_and_norm(ops, name, x, residual)
        (form, whole), bias = rounding, self._biases[name] if self._spec.is_layer_norm else None
        return form.norm_and_round(x, residual, self._weights[name], bias, self._spec.eps, whole=whole)

    def apply_norm(self, ops: Operations, name: str, x: Tensor) -> Tensor:
        if name not in self._sizes_by_name:
            return x
        weight, eps = self._weights[name], self._spec.eps
        return (
            ops.layer_norm(x, weight, self._biases[name], eps)
            if self._spec.is_layer_norm
            else ops.rms_norm(x, weight, eps)
        )

    def parameters(self) -> ParameterTable:
        table = {
            f"{name}.weight": make_loadable_parameter(
                self._weights, name, (size,), self._dtype, partial(self._prepare_weight_and_zero_bias, name)
            )
            for name, size in self._sizes_by_name.items()
        }
        biases = self._sizes_by_name if self._spec.is_layer_norm and self._spec.bias else {}
        return table | {
            f"{name}.bias": make_loadable_parameter(self._biases, name, (size,), self._dtype, Tensor.float)
            for name, size in biases.items()
        }

    def _prepare_weight_and_zero_bias(self, name: str, tensor: Tensor) -> Tensor:
        weight = tensor.float() + self._spec.weight_offset
        if self._spec.is_layer_norm and not self._spec.bias:
            self._biases[name] = torch.zeros_like(weight)
        return weight


class LayerNormWeights:
    """float32; the bias is zero if the model has none."""

    def __init__(self, name: str, size: int, *, bias: bool) -> None:
        self._name, self._size = name, size
        self.weight = torch.ones(size)
        self.bias = torch.zeros(size)
        self._has_bias = bias

    def parameters(self) -> ParameterTable:
        def load_weight(tensor: Tensor) -> None:
            self.weight = tensor
            self.bias = self.bias.to(tensor.device)

        def load_bias(tensor: Tensor) -> None:
            self.bias = tensor

        table = {f"{self._name}.weight": LoadableParameter((self._size,), torch.float32, load_weight)}
        if self._has_bias:
            table[f"{self._name}.bias"] = LoadableParameter((self._size,), torch.float32, load_bias)
        return table
