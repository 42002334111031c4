"""Reads weights from GGUF files, one tensor at a time, as a checkpoint of the same family would have them: its names,
its order of rows, its norms. What is stored in few bits stays as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.folder import open_file
from quire.engine.gguf.config import PERMUTED
from quire.engine.gguf.header import Header, StoredTensor
from quire.engine.gguf.names import checkpoint_name
from quire.engine.gguf.types import TensorType
from quire.engine.layers.schemes.gguf import GROUPED, unpacked
from quire.engine.worker.loading.gguf_delta import DeltaNets, logarithms
from quire.engine.worker.loading.loader import TensorStream

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_HALVES = (".k_b_proj.weight", ".v_b_proj.weight")
"""What makes keys, and values, of latents, which newer files have apart: [heads, latent, key] and [heads, value,
latent]. A checkpoint has each head's key above its value: kv_b_proj."""
_ROWS = ("mlp.shared_expert_gate.weight", "moe_statics.e_score_correction_bias")
"""Which files may have as one axis, and a checkpoint has as two."""


def _drafts(stored: str, config: ModelConfig) -> bool:
    """Whether it is of the layers behind the model's, which guess tokens."""
    layer = stored.split(".")[1] if stored.startswith("blk.") else ""
    return bool(config.raw.get("num_nextn_predict_layers")) and layer.isdecimal() and int(layer) >= config.num_layers


def linear_types(header: Header, config: ModelConfig) -> Mapping[str, TensorType]:
    """The types of the weights of linears and the embedding, by their names in a checkpoint."""
    return {
        name.removesuffix(".weight"): tensor.type
        for stored, tensor in header.tensors.items()
        for name in _apart(_names(stored, tensor, config)[0])
        if tensor.type.name in GROUPED
    }


def _apart(names: list[str]) -> list[str]:
    """Qwen3-Next's files have two linears in one."""
    parts = [[name.replace("in_proj_ba", f"in_proj_{each}") for each in "ba"] for name in names if "in_proj_ba" in name]
    return parts[0] if parts else names


def _names(stored: str, tensor: StoredTensor, config: ModelConfig) -> tuple[list[str], bool]:
    """What a checkpoint calls the tensor, or each expert's part of it; and whether it has such parts."""
    count = config.raw.get("num_local_experts") or 0
    found = checkpoint_name(stored, config.model_type, count)
    if not isinstance(found, list):
        return [] if found is None else [found], False
    if tensor.shape[:1] != (count,):
        raise ModelError(f"model: {stored} has the shape {list(tensor.shape)}, which is not of {count} experts")
    # Each such tensor, of however few bytes, has many names.
    if _drafts(stored, config):
        return [], False
    if int(stored.split(".")[1]) >= config.num_layers or not stored.endswith((".weight", ".bias")):
        raise ModelError(f"model: the weights hold what the model does not have: {stored[:100]}")
    return found, True


def gguf_stream(header: Header, config: ModelConfig) -> TensorStream:
    """All tensors of a model's files."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.model_type in PERMUTED else {}
    halves, deltas = dict[str, Tensor](), DeltaNets(config)
    by_1 = config.model_type.startswith(("gemma", "qwen3_5", "qwen3_next")) or config.model_type == "nemotron"
    one = 1.0 if by_1 else 0.0
    for stored_name, stored in header.tensors.items():
        names, stacked = _names(stored_name, stored, config)
        if not names or _drafts(stored_name, config):
            continue
        rows = _read(stored_name, stored)
        if names[0].endswith(_HALVES):
            yield from _expansion(names[0], stored, rows, halves)
            continue
        if stacked:
            yield from zip(names, rows, strict=True)
        elif names[0].endswith(_ROWS):
            yield names[0], rows.view(1, -1)
        elif ".linear_attn." in names[0]:
            yield from deltas.arranged(names[0], rows)
        elif ".mamba." in names[0]:
            yield names[0], _of_space(names[0], rows)
        elif names[0].endswith("conv.conv.weight"):
            yield names[0], rows.unsqueeze(1)
        elif names[0].endswith("norm.weight"):
            yield names[0], rows.float() - one  # these families' files have what multiplies, not its offset from 1
        else:
            count = heads.get(names[0].split(".")[-2])
            yield names[0], rows if count is None else unpermuted(names[0], rows, count)


def _of_space(name: str, rows: Tensor) -> Tensor:
    """A tensor of a state space, or of a selective scan, as a checkpoint has it: rates' logarithms; numbers of heads,
    and norms of groups of these, on one axis. Raises ModelError."""
    match name.partition(".mamba.")[2]:
        case "conv1d.weight":
            return rows.unsqueeze(1)
        case "A_log":
            rates = logarithms(name, rows)
            return rates.flatten() if rows.shape[1:] == (1,) else rates
        case "D" | "norm.weight":
            return rows.flatten()
    return rows


def _expansion(name: str, stored: StoredTensor, rows: Tensor, halves: dict[str, Tensor]) -> TensorStream:
    """kv_b_proj of its two halves, once both are there: what came first waits in `halves`."""
    if rows.ndim != 3:
        raise ModelError(f"model: {name} has the shape {list(stored.shape)}, which is not of heads")
    if stored.type.name in GROUPED:
        rows = unpacked(rows.flatten(0, 1), stored.type.name).dequantized().view(stored.shape)
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    half = rows.float().transpose(1, 2) if kind == "k_b_proj" else rows.float()
    other = halves.pop(layer, None)
    if other is None:
        halves[layer] = half
        return
    keys, values = (half, other) if kind == "k_b_proj" else (other, half)
    if keys.shape[::2] != values.shape[::2]:
        raise ModelError(f"model: {name} has the shape {list(stored.shape)}, which does not go with its other half")
    yield f"{layer}.kv_b_proj.weight", torch.cat((keys, values), dim=1).flatten(0, 1)


def unpermuted(name: str, rows: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys as rotations of halves need them: files have the two halves of each head in turns."""
    if not rows.ndim or rows.shape[0] % (2 * heads):
        raise ModelError(f"model: {name} has the shape {list(rows.shape)}, whose rows are not {heads} heads")
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _read(name: str, stored: StoredTensor) -> Tensor:
    """A tensor of the file's numbers; a quantized one as its bytes, [rows, bytes] uint8."""
    file = open_file(stored.file)
    content = bytearray(stored.nbytes)
    read = 0
    if file is not None:
        with file:
            read = _fill(file.fileno(), content, stored.offset)
    if read < len(content):
        raise ModelError(f"model: {stored.file.name}: {name}: the file ends before it does")
    if stored.type.name in _FLOATS:
        return torch.frombuffer(content, dtype=_FLOATS[stored.type.name]).view(stored.shape)
    return torch.frombuffer(content, dtype=torch.uint8).view(*stored.shape[:-1], -1)


def _fill(descriptor: int, content: bytearray, offset: int) -> int:
    """Read into all of `content`, as far as the file goes. Returns the bytes read; one call reads 2 GiB at most."""
    view, read = memoryview(content), 0
    while read < len(content):
        if (more := os.preadv(descriptor, [view[read:]], offset + read)) == 0:
            break
        read += more
    return read
