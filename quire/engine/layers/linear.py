from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor

from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.parameters import LoadableParameter, ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice
from quire.kernels.backend import Linear, LinearContext, Operations
from quire.kernels.quantized_tensors import Activations


class Projection(Protocol):
    def parameters(self) -> ParameterTable: ...

    def project(self, ops: Operations, x: Activations, context: LinearContext) -> Tensor:
        """Maps [T, in_features] to [T, out_features]. Must not change x."""


class FusedLinear:
    """Linears with the same input, such as q, k, v. They are packed as soon as the last tensor arrives, which saves
    memory.
    """

    def __init__(
        self,
        scheme: QuantizationScheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        wide: bool = False,
        adapters: AdapterManager | None = None,
        cuts: Mapping[str, LinearSlice] | None = None,
    ) -> None:
        """`parts`: out_features by name, in output order. `wide`: results are float32. `cuts`: this rank's slices."""
        self._part_sizes = parts, in_features
        self._cuts = dict.fromkeys(parts, FULL_LINEAR) if cuts is None else cuts
        self._adapters = adapters
        self._scheme = scheme
        self._wide = wide
        self._tensor_specs = {
            name: scheme.linear_tensor_specs(name, in_features, out, bias=bias) for name, out in parts.items()
        }
        self._loaded_tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._packed_linear: Linear | None = None
        self._shared_uses: list[SharedLinear] = []

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(self._tensor_specs)

    @property
    def packed_linear(self) -> Linear:
        assert self._packed_linear is not None, "weights are not loaded"
        return self._packed_linear

    def project(self, ops: Operations, x: Activations, context: LinearContext) -> Tensor:
        return ops.apply_linear(self.packed_linear, x, context)

    def share_weights(self, names: tuple[str, ...]) -> SharedLinear:
        """`names` replace the parts' names, in order."""
        parts, in_features = self._part_sizes
        renamed_parts = dict(zip(parts, names, strict=True))
        sizes = {renamed_parts[part]: size for part, size in parts.items()}, in_features
        use = SharedLinear(self._adapters, sizes, {renamed_parts[part]: self._cuts[part] for part in parts})
        self._shared_uses.append(use)
        return use

    def watch_inputs(self, on_input: Callable[[Tensor], None]) -> None:
        """`on_input` receives [rows, in_features]. Backends do not record a watched linear."""
        packed = self.packed_linear

        def watched_linear(x: Tensor, context: LinearContext) -> Tensor:
            on_input(x)
            return packed(x, context)

        self._packed_linear = watched_linear

    def parameters(self) -> ParameterTable:
        return {
            f"{part}.{name}": LoadableParameter(
                each.shape,
                each.dtype,
                self._make_weight_loader(part, name),
                partial(self._cuts[part].slice_tensor_on_read, which=each.early_slice_axes),
            )
            for part, tensors in self._tensor_specs.items()
            for name, each in tensors.items()
        }

    def _make_weight_loader(self, part: str, name: str) -> Callable[[Tensor], None]:
        def load_tensor(tensor: Tensor) -> None:
            self._loaded_tensors[part][name] = tensor
            if all(len(self._loaded_tensors[each]) == len(self._tensor_specs[each]) for each in self._tensor_specs):
                packed = self._scheme.pack_linears(self._loaded_tensors, self._cuts, wide=self._wide)
                for use in self._shared_uses:
                    use.set_weights(packed)
                if self._adapters is not None:
                    packed = self._adapters.add_slots_to_linear(packed, *self._part_sizes, self._cuts, wide=self._wide)
                self._packed_linear = packed
                self._loaded_tensors = {each: {} for each in self._tensor_specs}

        return load_tensor


class SharedLinear:
    """Another use of a FusedLinear's weights, with its own adapters."""

    def __init__(
        self, adapters: AdapterManager | None, sizes: tuple[dict[str, int], int], cuts: Mapping[str, LinearSlice]
    ) -> None:
        self._adapters = adapters
        self._part_sizes = sizes
        self._cuts = cuts
        self._packed_linear: Linear | None = None

    def set_weights(self, packed: Linear) -> None:
        self._packed_linear = packed
        if self._adapters is not None:
            self._packed_linear = self._adapters.add_slots_to_linear(packed, *self._part_sizes, self._cuts, wide=False)

    def parameters(self) -> ParameterTable:
        return {}

    def project(self, ops: Operations, x: Activations, context: LinearContext) -> Tensor:
        assert self._packed_linear is not None, "weights are not loaded"
        return ops.apply_linear(self._packed_linear, x, context)


class DequantizedWeightLoader:
    def __init__(
        self,
        scheme: QuantizationScheme,
        name: str,
        in_features: int,
        out_features: int,
        cut: LinearSlice,
        on_loaded: Callable[[Tensor], None],
    ) -> None:
        """`on_loaded` receives [out, in] in the model's dtype."""
        self._scheme = scheme
        self._name = name
        self._slice = cut
        self._on_loaded = on_loaded
        self._tensor_specs = scheme.linear_tensor_specs(name, in_features, out_features, bias=False)
        self._loaded_tensors: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        return {
            f"{self._name}.{name}": LoadableParameter(
                spec.shape,
                spec.dtype,
                partial(self._collect_tensor, name),
                partial(self._slice.slice_tensor_on_read, which=spec.early_slice_axes),
            )
            for name, spec in self._tensor_specs.items()
        }

    def _collect_tensor(self, name: str, tensor: Tensor) -> None:
        self._loaded_tensors[name] = tensor
        if len(self._loaded_tensors) == len(self._tensor_specs):
            self._on_loaded(self._scheme.dense_weight(self._name, self._loaded_tensors, self._slice))
            self._loaded_tensors = {}
