"""Experts of families whose checkpoints hold all of a layer in one tensor, gpt-oss and Granite, each as tensors of its
own, named as in other families. MXFP4 becomes what compressed-tensors calls mxfp4-pack-quantized."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from quire.engine.checkpoint.families import ENCODERS, STACKED
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.worker.loading.weight_loader import TensorStream
from quire.engine.worker.loading.weight_mapper import WeightMapper

_STACKED_NAME = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)$")
_TENSOR_NAMES = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
_GRANITE_NAME = re.compile(
    r"(.*\.block_sparse_moe)\.(?:experts\.(?:gate_up|(down))_proj|(?:input|(output))_linear\.weight)$"
)
_NUM_AXES = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def split_stacked_experts(
    stream: TensorStream,
    *,
    halves: bool = False,
    transposed_hidden_size: int | None = None,
    always_transposed: bool = False,
) -> TensorStream:
    """The tensors of the stream, those of stacked experts as views of them. halves: gate and up are the halves of the
    outputs, as in Granite's, whatever their names. turned: for hidden states of this size they may have a column for
    each output instead of a row, as Qwen3-VL was published. columns: they always have, as Llama 4's."""
    for name, tensor in stream:
        if (granite := _GRANITE_NAME.match(name)) is not None and tensor.ndim == 3:
            yield from _split_gate_up_halves(granite[1], tensor, down=bool(granite[2] or granite[3]))
            continue
        match = _STACKED_NAME.match(name)
        if halves and match is not None and tensor.ndim == 3:
            down = match[2] == "down"
            first, second = tensor.shape[1:]
            by_columns = always_transposed or (
                transposed_hidden_size == (second if down else first) and first != second
            )
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
    """Gate and up are the halves of the outputs."""
    for expert, rows in enumerate(tensor):
        parts = [("down", rows)] if down else zip(("gate", "up"), rows.chunk(2), strict=True)
        for linear, part in parts:
            yield f"{prefix}.experts.{expert}.{linear}_proj.weight", part


def _to_output_rows(tensor: Tensor, kind: str) -> Tensor:
    """One row for each output. Blocks are [outputs, groups, 16 bytes]; numbers are transposed."""
    if kind == "_blocks":
        return tensor.flatten(1)
    return tensor.t() if kind == "" else tensor


def _split_interleaved_gate_up(name: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The outputs of gate and up are in turns."""
    if name == "down":
        yield name, rows
    else:
        yield "gate", rows[::2]
        yield "up", rows[1::2]


def map_checkpoint_tensors(model_config: ModelConfig, stream: TensorStream, *, gguf: bool = False) -> TensorStream:
    """The tensors of a checkpoint of this family, or of a GGUF file, each that of one linear; what transformers' class
    computes puts them in order itself."""
    if model_config.model_type in ENCODERS or model_config.given is not None:
        return stream
    kind = model_config.model_type
    transposed_hidden_size, always_transposed = (
        model_config.hidden_size if kind == "qwen3_vl_moe_text" else None,
        kind == "llama4_text",
    )
    halves = transposed_hidden_size is not None or always_transposed or kind in ("gemma4_text", "qwen3_5_moe_text")
    split_stream = (
        split_stacked_experts(
            stream, halves=halves, transposed_hidden_size=transposed_hidden_size, always_transposed=always_transposed
        )
        if kind in STACKED
        else stream
    )
    return WeightMapper(model_config, gguf=gguf).map_stream(split_stream)
