"""Streams tensors into a parameter table. Each tensor is read once, and only one is in memory in
addition to the model.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.engine.checkpoint.tensor_headers import find_weight_files, is_pickled, text_tensor_name, vision_tensor_name
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import open_required
from quire.engine.layers.parameters import ParameterTable

TensorStream = Iterator[tuple[str, Tensor]]
NamedTensors = Iterable[tuple[str, Tensor]]
_HEAD_NAME, _EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
_REMAP_BYTES = 32 << 20
_MAX_NAME_CHARACTERS = 100
_MAX_NAMES = 8


def load_weights(
    table: ParameterTable, stream: NamedTensors, *, device: torch.device, require_finite: bool = False
) -> int:
    """Returns the number of bytes loaded. Raises ModelError for missing, unexpected or misshapen tensors. Also raises
    it for infinity or NaN in the output head or, if `require_finite`, in any tensor. NaN in other tensors spreads to
    whole rows of logits, so their requests fail. NaN in the head spoils single logits, which no step would notice.
    """
    missing, head_name = dict(table), _HEAD_NAME if _HEAD_NAME in table else _EMBEDDING_NAME
    left_over = []
    size = 0
    for name, tensor in _merge_tied_head(stream, table):
        if name not in missing:
            if not name.endswith("rotary_emb.inv_freq"):  # saved by old exporters
                left_over.append(name)
            continue
        parameter = missing.pop(name)
        if tuple(tensor.shape) != parameter.shape:
            raise ModelError(f"model: {name} has shape {list(tensor.shape)}, config.json means {list(parameter.shape)}")
        if tensor.dtype != parameter.dtype and not (
            _is_castable_float(tensor.dtype) and _is_castable_float(parameter.dtype)
        ):
            raise ModelError(f"model: {name} is stored as {tensor.dtype}, not as {parameter.dtype}")
        tensor = parameter.slice_tensor(tensor)
        # Copy, because a view would keep the whole mapped file in memory.
        tensor = tensor.to(device=device, dtype=parameter.dtype, copy=True)
        if (require_finite or name == head_name) and not _is_finite(tensor):
            raise ModelError(f"model: {name} holds numbers that are infinite or NaN")
        parameter.weight_loader(tensor)
        size += tensor.numel() * parameter.dtype.itemsize
    if missing:
        more = f"; they have tensors that the model lacks: {_format_names(left_over)}" if left_over else ""
        raise ModelError(f"model: the weights lack {_format_names(list(missing))}{more}")
    if left_over:
        raise ModelError(f"model: the weights have tensors that the model lacks: {_format_names(left_over)}")
    return size


def _merge_tied_head(stream: NamedTensors, table: ParameterTable) -> TensorStream:
    """If the model ties its head to the embedding, a stored head replaces a missing embedding. If both are stored, the
    head is dropped. Raises ModelError if they differ, as they may in replacement weights.
    """
    if _HEAD_NAME in table or _EMBEDDING_NAME not in table:
        yield from stream
        return
    head_and_embedding: dict[str, Tensor] = {}
    for name, tensor in stream:
        if name in (_HEAD_NAME, _EMBEDDING_NAME):
            head_and_embedding[name] = tensor
        if len(head_and_embedding) == 2:
            _check_head_equals_embedding(*head_and_embedding.values())
            head_and_embedding = {}
        if name != _HEAD_NAME:
            yield name, tensor
    if _HEAD_NAME in head_and_embedding:
        yield _EMBEDDING_NAME, head_and_embedding[_HEAD_NAME]


def _check_head_equals_embedding(one: Tensor, other: Tensor) -> None:
    if "meta" in (one.device.type, other.device.type) or torch.equal(one.to(other.device, other.dtype), other):
        return
    raise ModelError("model: lm_head.weight differs from the embedding, which the served model's head is tied to")


def _is_finite(tensor: Tensor) -> bool:
    """`torch.isfinite` takes ten times as long. 8-bit floats and integers count as finite, because their scales are
    checked instead.
    """
    return (
        not _is_castable_float(tensor.dtype)
        or tensor.is_meta
        or not tensor.numel()
        or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
    )


def _is_castable_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def checkpoint_stream(path: Path, name_of: Callable[[str], str | None] = text_tensor_name) -> TensorStream:
    """Skips tensors for which `name_of` returns None."""
    for shard in require_shards(find_weight_files(path)):
        for stored, tensor in iter_file_tensors(shard, lambda stored: name_of(stored) is not None):
            yield name_of(stored) or stored, tensor


def image_weight_stream(path: Path, unused: tuple[str, ...]) -> TensorStream:
    def image_name(stored: str) -> str | None:
        name = vision_tensor_name(stored)
        return None if name is None or name.startswith(unused) else name

    return checkpoint_stream(path, image_name)


def require_shards(shards: Sequence[Path]) -> Sequence[Path]:
    """Raises ModelError."""
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(f"model: {shards[0].parent.name} lacks {_format_names(missing)}")
    return shards


def rename_tensors_to_table_names(
    stream: NamedTensors, table: ParameterTable, unused: tuple[str, ...] = ()
) -> TensorStream:
    """Add or remove a prefix, because models may be saved alone or within other models."""
    for name, tensor in stream:
        names = name, f"model.{name}", name.partition(".")[2]
        known = next((each for each in names if each in table), name)
        if known in table or not any(each.startswith(unused) for each in names):
            yield known, tensor


def prefixed_folders_stream(path: Path, folders: Sequence[str]) -> TensorStream:
    for folder in folders:
        yield from prefix_names(folder, checkpoint_stream(path / folder))


def prefix_names(folder: str, stream: TensorStream) -> TensorStream:
    for name, tensor in stream:
        yield f"{folder}.{name}", tensor


def iter_file_tensors(shard: Path, is_wanted: Callable[[str], bool] = lambda _: True) -> TensorStream:
    """Remaps a safetensors file every _REMAP_BYTES, because mapped pages that were read count as used memory. Raises
    ModelError.
    """
    if is_pickled(shard):
        tensors = read_pickled_tensors(shard)
        yield from ((name, tensors.pop(name)) for name in [*tensors] if is_wanted(name))
        return
    try:
        with safe_open(shard, framework="pt") as file:
            names = [name for name in reversed(file.keys()) if is_wanted(name)]
        while names:
            with safe_open(shard, framework="pt") as file:
                read = 0
                while names and read < _REMAP_BYTES:
                    tensor = file.get_tensor(name := names.pop())
                    read += tensor.nbytes
                    yield name, tensor
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model: {shard.name} cannot be read: {error}") from error


def read_pickled_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors are memory-mapped if PyTorch 1.6 or later saved the file. Raises ModelError."""
    with open_required(file) as opened:
        can_map = zipfile.is_zipfile(opened)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # a broken file may raise anything
        raise ModelError(f"model: {file.name} cannot be read: {str(error).partition('.')[0][:200]}") from error
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise ModelError(f"model: {file.name} does not hold tensors by name")
    return {str(name): each.detach() for name, each in content.items()}


def dummy_stream(table: ParameterTable, seed: int, device: torch.device) -> TensorStream:
    """Matrices have variance 1 / fan-in; vectors are near 1, and biases near 0."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in table.items():
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(generator=generator)
        if len(parameter.shape) < 2:
            yield name, noise * 0.02 if name.endswith("bias") else 1 + noise * 0.02
        else:
            yield name, noise * parameter.shape[-1] ** -0.5


def _format_names(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(name[:_MAX_NAME_CHARACTERS] for name in names[:_MAX_NAMES]) + more
