"""Maps a checkpoint's tensors to the model's modules. Splits fused linears, and reorders query and key rows for
half-rotated RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.architecture.recurrent import DeltaNetSpec
from quire.engine.checkpoint.config_reader import find_weight_names
from quire.engine.checkpoint.tensor_headers import TensorHeader, text_tensor_name
from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.weight_names import LAYER_MODULE_PATTERN, WeightNames, rope_head_permutation
from quire.engine.models import decoder_spec
from quire.engine.worker.loading.weight_loader import TensorStream

_COLUMN_TENSORS = ("qweight", "qzeros", "scales")
"""GPTQ and AWQ store a linear's outputs as columns of these tensors."""
_ROTATED_PROJECTIONS = {f"self_attn.{name}_proj" for name in "qk"}
_HEAD_NORMS = {f"self_attn.{name}_norm" for name in "qk"}


@dataclass(frozen=True, slots=True)
class _OutputSlice:
    index: Tensor
    num_outputs: int

    def slice_tensor(self, tensor: Tensor, axis: int, name: str) -> Tensor:
        """One element may stand for several outputs; raises ModelError if the slice would split such an element."""
        if tensor.ndim <= axis or not tensor.shape[axis] or self.num_outputs % tensor.shape[axis]:
            raise _unsplittable_error(name)
        unit = self.num_outputs // tensor.shape[axis]
        first = int(self.index[0])
        count = len(self.index)
        if torch.equal(self.index, torch.arange(first, first + count)) and first % unit == count % unit == 0:
            return tensor.narrow(axis, first // unit, count // unit)
        if unit != 1:
            raise _unsplittable_error(name)
        return tensor.index_select(axis, self.index.to(tensor.device))


class WeightMapper:
    def __init__(self, config: ModelConfig, *, gguf: bool = False) -> None:
        self._config, self._weight_names = config, find_weight_names(config.model_type, gguf=gguf)
        self._head_order = rope_head_permutation(
            config.rope, config.head_dim, interleaved=self._weight_names.has_interleaved_rope
        )
        self._has_draft_layers = bool(config.raw.get("num_nextn_predict_layers"))
        self._is_identity = (
            self._weight_names == WeightNames() and self._head_order is None and not self._has_draft_layers
        )
        self._slices_by_module: dict[str, list[_OutputSlice | None]] = {}
        """For each module, one slice per linear; None means all outputs."""

    def map_stream(self, stream: TensorStream) -> TensorStream:
        return stream if self._is_identity else (each for item in stream for each in self._map_tensor(*item))

    def map_headers(self, headers: Mapping[str, TensorHeader]) -> Mapping[str, TensorHeader]:
        if self._is_identity:
            return headers
        return {
            own: TensorHeader(header.dtype, tuple(tensor.shape))
            for name, header in headers.items()
            for own, tensor in self._map_tensor(name, torch.empty(header.shape, dtype=torch.uint8, device="meta"))
        }

    def map_module_name(self, name: str) -> tuple[str, ...]:
        return self._weight_names.modules_from_checkpoint(name)

    def checkpoint_module_name(self, linear: str) -> str:
        return self._weight_names.module_in_checkpoint(linear)

    def split_outputs(self, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for own, piece in zip(self.map_module_name(module), self._output_slices(module), strict=True):
            yield own, tensor if piece is None else piece.slice_tensor(tensor, 0, module)

    def _map_tensor(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        module, _, kind = name.rpartition(".")
        modules, layer_match = self.map_module_name(module), LAYER_MODULE_PATTERN.fullmatch(module)
        if layer_match is None:
            skipped = self._weight_names.position_offset if modules == ("model.embed_positions",) else 0
            yield f"{modules[0]}.{kind}", tensor[skipped:] if skipped else tensor
        elif int(layer_match[1]) >= self._config.num_layers and self._has_draft_layers:
            return  # MTP layers
        elif f"{layer_match[2]}.{kind}" not in self._weight_names.unused_tensors:
            if kind == "weight" and layer_match[2] in self._weight_names.transposed_modules:
                tensor = tensor.t()
            for module_name, output_slice in zip(modules, self._output_slices(module), strict=True):
                yield f"{module_name}.{kind}", self._slice_for_module(module_name, kind, output_slice, tensor)

    def _slice_for_module(
        self, module_name: str, kind: str, output_slice: _OutputSlice | None, tensor: Tensor
    ) -> Tensor:
        size = self._config.head_dim
        if module_name.endswith(tuple(_HEAD_NORMS)) and tensor.numel() % size == 0:  # weights of one or all heads
            heads = tensor.reshape(-1, size)
            return heads.flatten() if self._head_order is None else heads[:, self._head_order].flatten()
        if output_slice is None or kind == "g_idx" or tensor.numel() == 1:
            return tensor
        if kind == "weight_shape":
            return tensor.clone().index_fill_(0, torch.tensor([0], device=tensor.device), len(output_slice.index))
        return output_slice.slice_tensor(tensor, 1 if kind in _COLUMN_TENSORS else 0, f"{module_name}.{kind}")

    def _output_slices(self, module: str) -> list[_OutputSlice | None]:
        inside = layer_match[2] if (layer_match := LAYER_MODULE_PATTERN.fullmatch(module)) is not None else module
        if inside not in self._slices_by_module:
            self._slices_by_module[inside] = self._make_module_slices(inside)
        return self._slices_by_module[inside]

    def _make_module_slices(self, stored: str) -> list[_OutputSlice | None]:
        weight_names, config = self._weight_names, self._config
        module_names = weight_names.layer_modules.get(stored, stored)
        if isinstance(module_names, str):
            if self._head_order is None or module_names not in _ROTATED_PROJECTIONS:
                return [None]
            count = config.num_heads if module_names == "self_attn.q_proj" else config.num_kv_heads
            every = torch.arange(count * config.head_dim)
            return [_OutputSlice(self._permute_within_heads(every), len(every))]
        if module_names[-1] == "self_attn.gate_proj":
            every = torch.arange(2 * config.num_heads * config.head_dim)
            queries, gates = (part.flatten() for part in every.view(-1, 2, config.head_dim).unbind(1))
            return [_OutputSlice(self._permute_within_heads(queries), len(every)), _OutputSlice(gates, len(every))]
        if module_names[0] not in _ROTATED_PROJECTIONS:
            return self._consecutive_slices(module_names)
        groups = config.num_kv_heads if weight_names.is_fused_by_kv_head else 1
        each = config.num_kv_heads // groups
        every = torch.arange((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        heads = every.view(groups, -1, config.head_dim).split((config.num_heads // groups, each, each), dim=1)
        queries, keys, values = (part.flatten() for part in heads)
        return [
            _OutputSlice(rows, len(every))
            for rows in (self._permute_within_heads(queries), self._permute_within_heads(keys), values)
        ]

    def _consecutive_slices(self, module_names: tuple[str, ...]) -> list[_OutputSlice | None]:
        """In a fused delta net, linears are interleaved by key head instead."""
        spec = decoder_spec(self._config)
        if (sizes := _find_linear_sizes(spec, module_names)) is None:
            return [None] * len(module_names)  # loading reports that no layer has this module
        is_fused_by_head = self._weight_names.is_fused_by_kv_head and module_names[0].startswith("linear_attn.")
        groups = spec.sublayers_of_kind(DeltaNetSpec)[0].num_key_heads if is_fused_by_head else 1
        every = torch.arange(sum(sizes)).view(groups, -1)
        parts = every.split([size // groups for size in sizes], dim=1)
        return [_OutputSlice(part.flatten(), every.numel()) for part in parts]

    def _permute_within_heads(self, rows: Tensor) -> Tensor:
        return rows if self._head_order is None else rows.view(-1, self._config.head_dim)[:, self._head_order].flatten()


def _find_linear_sizes(spec: DecoderSpec, names: Sequence[str]) -> list[int] | None:
    for index, layer in enumerate(spec.layers):
        shapes = ParameterShapes()
        for sublayer in layer:
            shapes |= sublayer.parameter_shapes(f"model.layers.{index}", spec.hidden_size)
        num_outputs = {name.split(".", 3)[-1]: shape[0] for name, shape in shapes.items() if shape}
        weights = [f"{name}.weight" for name in names]
        if num_outputs.keys() >= {*weights}:
            return [num_outputs[weight] for weight in weights]
    return None


def make_stored_module_name_lookup(headers: Iterable[str]) -> Callable[[str], str]:
    file_names, root = dict[str, str](), "model."
    for module in (name.rpartition(".")[0] for name in headers):
        if (text := text_tensor_name(module)) is None:
            continue
        name = LAYER_MODULE_PATTERN.sub(r"model.layers.\1.\2", text)
        file_names[name] = module
    layer = next((name for name in file_names if name.startswith("model.layers.")), None)
    if layer is not None and file_names[layer].endswith(inner := layer.removeprefix("model.")):
        root = file_names[layer].removesuffix(inner)
    return lambda name: file_names.get(
        name, f"{root}{name.removeprefix('model.')}" if "model.layers." in name else name
    )


def _unsplittable_error(name: str) -> ModelError:
    return ModelError(
        f"model: {name[:100]}: the checkpoint fuses it with other tensors or orders its heads otherwise, in a "
        "quantized format that cannot be split; serve the unquantized weights with --quantization"
    )
