"""Reads GGUF tensors in the form of the family's checkpoints. Quantized tensors stay quantized."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import open_if_present
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.gguf.header import GGUFHeader, GGUFTensor
from quire.engine.gguf.tensor_names import checkpoint_names
from quire.engine.gguf.tensor_types import GGMLType
from quire.engine.layers.schemes.gguf import SUPPORTED_QUANT_TYPES, blocks_to_grouped_weight
from quire.engine.models import decoder_spec
from quire.engine.worker.loading.gguf_delta_net import GGUFDeltaNetConverter, gguf_format, log_decay_rates
from quire.engine.worker.loading.weight_loader import TensorStream

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALED_TYPE = "NVFP4"

_KV_B_HALVES = (".k_b_proj.weight", ".v_b_proj.weight")
"""Newer files split kv_b_proj into these tensors: [heads, latent, key] and [heads, value, latent]."""
_SINGLE_ROW_TENSORS = ("mlp.shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Files may store these tensors without an axis of size 1."""


def _is_draft_layer(stored: str, config: ModelConfig) -> bool:
    layer = stored.split(".")[1] if stored.startswith("blk.") else ""
    return bool(config.raw.get("num_nextn_predict_layers")) and layer.isdecimal() and int(layer) >= config.num_layers


def linear_tensor_types(header: GGUFHeader, config: ModelConfig) -> Mapping[str, GGMLType]:
    return {
        name.removesuffix(".weight"): tensor.type
        for stored, tensor in header.tensors.items()
        if tensor.type.name in SUPPORTED_QUANT_TYPES
        for name in _split_fused_names(_checkpoint_names(stored, tensor, config)[0])
    }


def tensor_scales(header: GGUFHeader, config: ModelConfig) -> Mapping[str, float]:
    """Returns a factor for each NVFP4 linear. A file has one factor for a tensor, or one for each of its parts. Raises
    ModelError for factors of another shape or type.
    """
    scales = dict[str, float]()
    for stored_name, stored in header.tensors.items():
        scale_name = stored_name.removesuffix("weight") + "scale"
        if stored.type.name != _SCALED_TYPE or (scale := header.tensors.get(scale_name)) is None:
            continue
        names = _split_fused_names(_checkpoint_names(stored_name, stored, config)[0])
        numbers = _read_tensor(scale_name, scale).float().flatten().tolist()
        if scale.type.name not in _FLOATS or len(numbers) not in (1, len(names)):
            raise ModelError(f"model: {scale_name} has the shape {list(scale.shape)}, expected a factor")
        factors = numbers if len(numbers) == len(names) else numbers * len(names)
        scales |= zip((name.removesuffix(".weight") for name in names), factors, strict=True)
    return scales


def _tensors_without_scales(header: GGUFHeader) -> Iterator[tuple[str, GGUFTensor]]:
    """Omits `scale` and `input_scale` of NVFP4 weights. `tensor_scales` reads the former; the latter is for
    activations, whose scales Quire computes itself.
    """
    for name, tensor in header.tensors.items():
        stem, _, suffix = name.rpartition(".")
        weight = header.tensors.get(f"{stem}.weight")
        if suffix not in ("scale", "input_scale") or weight is None or weight.type.name != _SCALED_TYPE:
            yield name, tensor


def _split_fused_names(names: list[str]) -> list[str]:
    """Qwen3-Next fuses two linears in in_proj_ba."""
    parts = [[name.replace("in_proj_ba", f"in_proj_{each}") for each in "ba"] for name in names if "in_proj_ba" in name]
    return parts[0] if parts else names


def _checkpoint_names(stored: str, tensor: GGUFTensor, config: ModelConfig) -> tuple[list[str], bool]:
    """Returns the tensor's name and False, or the names of all experts' parts and True."""
    count = config.raw.get("num_local_experts") or 0
    names = checkpoint_names(stored, gguf_format(config), count)
    if not isinstance(names, list):
        return [] if names is None else [names], False
    if tensor.shape[:1] != (count,):
        raise ModelError(f"model: {stored} has the shape {list(tensor.shape)}, which is not of {count} experts")
    # Skip or refuse unused tensors here, because even a tiny tensor may have as many names as there are experts.
    if _is_draft_layer(stored, config):
        return [], False
    if int(stored.split(".")[1]) >= config.num_layers or not stored.endswith((".weight", ".bias")):
        raise ModelError(f"model: the weights have tensors that the model lacks: {stored[:100]}")
    return names, True


def gguf_stream(header: GGUFHeader, config: ModelConfig) -> TensorStream:
    permutes = gguf_format(config).permutes_queries_and_keys
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if permutes else {}
    halves, deltas = dict[str, Tensor](), GGUFDeltaNetConverter(config)
    norm_offset = decoder_spec(config).norm.weight_offset
    for stored_name, stored in _tensors_without_scales(header):
        names, stacked = _checkpoint_names(stored_name, stored, config)
        if not names or _is_draft_layer(stored_name, config):
            continue
        rows = _read_tensor(stored_name, stored)
        if names[0].endswith(_KV_B_HALVES):
            yield from _join_kv_b(names[0], stored, rows, halves)
            continue
        if stacked:
            yield from zip(names, rows, strict=True)
        elif names[0].endswith(_SINGLE_ROW_TENSORS):
            yield names[0], rows.view(1, -1)
        elif ".linear_attn." in names[0]:
            yield from deltas.convert_to_named_tensors(names[0], rows)
        elif ".mamba." in names[0]:
            yield names[0], _convert_mamba_tensor(names[0], rows)
        elif names[0].endswith("conv.conv.weight"):
            yield names[0], rows.unsqueeze(1)
        elif names[0].endswith("norm.weight"):
            yield names[0], rows.float() - norm_offset  # files store weight plus offset
        else:
            count = heads.get(names[0].split(".")[-2])
            yield names[0], rows if count is None else undo_rope_permutation(names[0], rows, count)


def _convert_mamba_tensor(name: str, rows: Tensor) -> Tensor:
    match name.partition(".mamba.")[2]:
        case "conv1d.weight":
            return rows.unsqueeze(1)
        case "A_log":
            rates = log_decay_rates(name, rows)
            return rates.flatten() if rows.shape[1:] == (1,) else rates
        case "D" | "norm.weight":
            return rows.flatten()
    return rows


def _join_kv_b(name: str, stored: GGUFTensor, rows: Tensor, halves: dict[str, Tensor]) -> TensorStream:
    """Yields the joined tensor once both halves are read. The first half waits in `halves`."""
    if rows.ndim != 3:
        raise ModelError(f"model: {name} has the shape {list(stored.shape)}, which is not of heads")
    if stored.type.name in SUPPORTED_QUANT_TYPES:
        rows = blocks_to_grouped_weight(rows.flatten(0, 1), stored.type.name).dequantize().view(stored.shape)
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    half = rows.float().transpose(1, 2) if kind == "k_b_proj" else rows.float()
    other = halves.pop(layer, None)
    if other is None:
        halves[layer] = half
        return
    keys, values = (half, other) if kind == "k_b_proj" else (other, half)
    if keys.shape[::2] != values.shape[::2]:
        raise ModelError(f"model: {name} has the shape {list(stored.shape)}, which does not match its other half")
    yield f"{layer}.kv_b_proj.weight", torch.cat((keys, values), dim=1).flatten(0, 1)


def undo_rope_permutation(name: str, rows: Tensor, heads: int) -> Tensor:
    """GGUF files interleave the two halves of each head."""
    if not rows.ndim or rows.shape[0] % (2 * heads):
        raise ModelError(f"model: {name} has the shape {list(rows.shape)}, whose rows are not {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _read_tensor(name: str, stored: GGUFTensor) -> Tensor:
    """Returns floats in the stored shape, and quantized tensors as [rows, bytes] uint8."""
    file = open_if_present(stored.file)
    content = bytearray(stored.nbytes)
    read = 0
    if file is not None:
        with file:
            read = _read_available_into(file.fileno(), content, stored.offset)
    if read < len(content):
        raise ModelError(f"model: {stored.file.name}: {name}: the file ends in the middle of it")
    if stored.type.name in _FLOATS:
        return torch.frombuffer(content, dtype=_FLOATS[stored.type.name]).view(stored.shape)
    return torch.frombuffer(content, dtype=torch.uint8).view(*stored.shape[:-1], -1)


def _read_available_into(descriptor: int, content: bytearray, offset: int) -> int:
    """One system call reads at most 2 GiB."""
    view, read = memoryview(content), 0
    while read < len(content):
        if (num_read := os.preadv(descriptor, [view[read:]], offset + read)) == 0:
            break
        read += num_read
    return read
