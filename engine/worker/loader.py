"""Reads weights from safetensors files, one tensor at a time, into a model's parameter table, or makes them up
(--load-format dummy). Nothing is read twice, and no more than one tensor beyond the model is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.engine.checkpoint.files import text_tensor, weight_files
from quire.engine.errors import ModelError
from quire.engine.layers.parameters import ParameterTable

TensorStream = Iterator[tuple[str, Tensor]]
_MAPPED_BYTES = 32 << 20
_NAMED = 8
"""An error lists this many tensor names and counts the rest."""


def load_weights(table: ParameterTable, stream: TensorStream, *, device: torch.device) -> int:
    """Put every tensor of the stream where the table says. Returns the bytes of the model.

    Raises ModelError naming the tensors that are missing, left over, or of another shape or type.
    """
    waiting, left_over, size = dict(table), [], 0
    tied = "lm_head.weight" not in table
    for name, tensor in stream:
        if name not in waiting:
            # Old exporters saved buffers, and some save a tied embedding twice: neither holds anything new.
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")):
                left_over.append(name)
            continue
        parameter = waiting.pop(name)
        if tuple(tensor.shape) != parameter.shape:
            raise ModelError(f"model: {name} has shape {list(tensor.shape)}, config.json means {list(parameter.shape)}")
        casts = tensor.is_floating_point() and parameter.dtype.is_floating_point
        if tensor.dtype != parameter.dtype and not casts:
            raise ModelError(f"model: {name} is stored as {tensor.dtype}, not as {parameter.dtype}")
        # A copy: a tensor that stayed a view of the mapped file would keep the whole of it in memory.
        parameter.put(tensor.to(device=device, dtype=parameter.dtype, copy=True))
        size += tensor.numel() * parameter.dtype.itemsize
    if waiting:
        raise ModelError(f"model: the weights lack {_listing(list(waiting))}")
    if left_over:
        raise ModelError(f"model: the weights hold what the model does not have: {_listing(left_over)}")
    return size


def safetensors_stream(path: Path) -> TensorStream:
    """All tensors of a model directory but those for images, from model.safetensors or the shards of its index."""
    shards = weight_files(path)
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(f"model: {path.name} lacks {_listing(missing)}")
    for shard in shards:
        try:
            yield from _tensors(shard)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model: {shard.name} cannot be read: {error}") from error


def _tensors(shard: Path) -> TensorStream:
    """Maps the file anew after every _MAPPED_BYTES read, because what was read of a mapped file counts as memory in use
    until it is unmapped."""
    with safe_open(shard, framework="pt") as file:
        names = list(file.keys())
    while names:
        with safe_open(shard, framework="pt") as file:
            read = 0
            while names and read < _MAPPED_BYTES:
                stored = names.pop(0)
                if (name := text_tensor(stored)) is not None:
                    tensor = file.get_tensor(stored)
                    read += tensor.nbytes
                    yield name, tensor


def dummy_stream(table: ParameterTable, seed: int, device: torch.device) -> TensorStream:
    """Random weights of the right shapes, made on the device: matrices of variance 1 / fan-in, vectors near one."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in table.items():
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(generator=generator)
        if len(parameter.shape) == 1:
            yield name, noise * 0.02 if name.endswith("bias") else 1 + noise * 0.02
        else:
            yield name, noise * parameter.shape[-1] ** -0.5


def _listing(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
