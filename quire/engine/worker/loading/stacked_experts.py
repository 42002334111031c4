"""Splits stacked experts, as in gpt-oss and Granite. MXFP4 becomes compressed-tensors' mxfp4-pack-quantized."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from quire.engine.checkpoint.config_reader import find_weight_names
from quire.engine.families import find_encoder_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.weight_names import StackedExperts
from quire.engine.worker.loading.weight_loader import TensorStream
from quire.engine.worker.loading.weight_mapper import WeightMapper

_STACKED_NAME = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)$")
_TENSOR_NAMES = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
_BLOCK_SPARSE_NAME = re.compile(
    r"(.*\.block_sparse_moe)\.(?:experts\.(?:gate_up|(down))_proj|(?:input|(output))_linear\.weight)$"
)
_NUM_AXES = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def split_stacked_experts(stream: TensorStream, stacked: StackedExperts, hidden_size: int) -> TensorStream:
    for name, tensor in stream:
        if (block_sparse := _BLOCK_SPARSE_NAME.match(name)) is not None and tensor.ndim == 3:
            yield from _split_gate_up_halves(block_sparse[1], tensor, down=bool(block_sparse[2] or block_sparse[3]))
            continue
        match = _STACKED_NAME.match(name)
        if stacked.gate_up_halves and match is not None and tensor.ndim == 3:
            down = match[2] == "down"
            first, second = tensor.shape[1:]
            looks_transposed = hidden_size == (second if down else first) and first != second
            by_columns = stacked.always_transposed or (stacked.maybe_transposed and looks_transposed)
            rows = tensor.transpose(1, 2) if by_columns else tensor
            yield from _split_gate_up_halves(match[1].removesuffix(".experts"), rows, down=down)
            continue
        if match is None or tensor.ndim != _NUM_AXES[match[3]]:
            yield name, tensor
            continue
        for expert, expert_tensor in enumerate(tensor):
            prefix = f"{match[1]}.{expert}"
            for linear, part in _split_interleaved_gate_up(match[2], _to_output_rows(expert_tensor, match[3])):
                yield f"{prefix}.{linear}_proj.{_TENSOR_NAMES[match[3]]}", part


def _split_gate_up_halves(prefix: str, tensor: Tensor, *, down: bool) -> TensorStream:
    """The first half of the outputs is gate, the second up."""
    for expert, rows in enumerate(tensor):
        parts = [("down", rows)] if down else zip(("gate", "up"), rows.chunk(2), strict=True)
        for linear, part in parts:
            yield f"{prefix}.experts.{expert}.{linear}_proj.weight", part


def _to_output_rows(tensor: Tensor, kind: str) -> Tensor:
    """Blocks are [outputs, groups, 16 bytes]; dense weights are transposed."""
    if kind == "_blocks":
        return tensor.flatten(1)
    return tensor.t() if kind == "" else tensor


def _split_interleaved_gate_up(name: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name == "down":
        yield name, rows
    else:
        yield "gate", rows[::2]
        yield "up", rows[1::2]


def map_checkpoint_tensors(model_config: ModelConfig, stream: TensorStream, *, gguf: bool = False) -> TensorStream:
    """The transformers backend does its own mapping."""
    if find_encoder_family(model_config.model_type) is not None or model_config.transformers_config is not None:
        return stream
    stacked = find_weight_names(model_config.model_type).stacked_experts
    split_stream = stream if stacked is None else split_stacked_experts(stream, stacked, model_config.hidden_size)
    return WeightMapper(model_config, gguf=gguf).map_stream(split_stream)
