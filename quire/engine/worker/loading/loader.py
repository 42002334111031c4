"""Reads weights from a model's files, one tensor at a time, into a model's parameter table, or makes them up
(--load-format dummy). Nothing is read twice, and no more than one tensor beyond the model is held."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.engine.checkpoint.safetensors import image_tensor, is_pickled, text_tensor, weight_files
from quire.engine.errors import ModelError
from quire.engine.folder import open_needed
from quire.engine.layers.parameters import ParameterTable

TensorStream = Iterator[tuple[str, Tensor]]
Tensors = Iterable[tuple[str, Tensor]]
"""Weights under their names in the checkpoint."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MAPPED_BYTES = 32 << 20
_NAMED_CHARACTERS = 100
_NAMED = 8
"""An error lists this many tensor names and counts the rest."""


def load_weights(table: ParameterTable, stream: Tensors, *, device: torch.device, finite: bool = False) -> int:
    """Put every tensor of the stream where the table says. Returns the bytes of the model.

    Raises ModelError naming the tensors that are missing, left over, or of another shape or type; with `finite`, also
    one that has a number that is infinite or NaN.
    """
    waiting, left_over, size = dict(table), [], 0
    for name, tensor in _tied(stream, table):
        if name not in waiting:
            if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old exporters saved
                left_over.append(name)
            continue
        parameter = waiting.pop(name)
        if tuple(tensor.shape) != parameter.shape:
            raise ModelError(f"model: {name} has shape {list(tensor.shape)}, config.json means {list(parameter.shape)}")
        if tensor.dtype != parameter.dtype and not (_casts(tensor.dtype) and _casts(parameter.dtype)):
            raise ModelError(f"model: {name} is stored as {tensor.dtype}, not as {parameter.dtype}")
        tensor = parameter.cut(tensor)
        # A copy: a tensor that stayed a view of the mapped file would keep the whole of it in memory.
        tensor = tensor.to(device=device, dtype=parameter.dtype, copy=True)
        if finite and not _is_finite(tensor):
            raise ModelError(f"model: {name} holds numbers that are infinite or NaN")
        parameter.put(tensor)
        size += tensor.numel() * parameter.dtype.itemsize
    if waiting:
        more = f"; they hold, which the model does not have: {_listing(left_over)}" if left_over else ""
        raise ModelError(f"model: the weights lack {_listing(list(waiting))}{more}")
    if left_over:
        raise ModelError(f"model: the weights hold what the model does not have: {_listing(left_over)}")
    return size


def _tied(stream: Tensors, table: ParameterTable) -> TensorStream:
    """The tensors of a model whose table has one for embedding and head: a head is the embedding where the stream has
    no other, and else a copy of it, which is left out (tied_as_stored says where it is not). Raises ModelError for a
    head that differs, as the weights may that take the place of others."""
    if _HEAD in table or _EMBEDDING not in table:
        yield from stream
        return
    ends: dict[str, Tensor] = {}
    for name, tensor in stream:
        if name in (_HEAD, _EMBEDDING):
            ends[name] = tensor
        if len(ends) == 2:
            _check_equal(*ends.values())
            ends = {}
        if name != _HEAD:
            yield name, tensor
    if _HEAD in ends:
        yield _EMBEDDING, ends[_HEAD]


def _check_equal(one: Tensor, other: Tensor) -> None:
    if "meta" in (one.device.type, other.device.type) or torch.equal(one.to(other.device, other.dtype), other):
        return
    raise ModelError("model: lm_head.weight differs from the embedding, which the served model's head is tied to")


def _is_finite(tensor: Tensor) -> bool:
    """By the least and the greatest, which are NaN where one number is: that takes a tenth of isfinite's time. Integers
    and the codes of 8-bit floats count as finite; their scales are tensors too."""
    return not _casts(tensor.dtype) or not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _casts(dtype: torch.dtype) -> bool:
    """Whether numbers of this type mean the same in another: 8-bit floats have a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def checkpoint_stream(path: Path, name_of: Callable[[str], str | None] = text_tensor) -> TensorStream:
    """The tensors of a model directory that have a name by `name_of`, by default all but those for images and of heads,
    from the files that weight_files finds."""
    for shard in present(weight_files(path)):
        for stored, tensor in stored_tensors(shard, lambda stored: name_of(stored) is not None):
            yield name_of(stored) or stored, tensor


def image_stream(path: Path, unused: tuple[str, ...]) -> TensorStream:
    """The tensors of a model directory that are for images, without those whose names begin like one of `unused`."""

    def wanted(stored: str) -> str | None:
        name = image_tensor(stored)
        return None if name is None or name.startswith(unused) else name

    return checkpoint_stream(path, wanted)


def present(shards: Sequence[Path]) -> Sequence[Path]:
    """The shards of one folder. Raises ModelError where some are not there."""
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise ModelError(f"model: {shards[0].parent.name} lacks {_listing(missing)}")
    return shards


def named_stream(stream: Tensors, table: ParameterTable, unused: tuple[str, ...] = ()) -> TensorStream:
    """The tensors under the names of the table where they differ from it by a prefix only, as a model's do that was
    saved alone or as part of another. Those of other names that begin like one of `unused` are left out.
    """
    for name, tensor in stream:
        names = name, f"model.{name}", name.partition(".")[2]
        known = next((each for each in names if each in table), name)
        if known in table or not any(each.startswith(unused) for each in names):
            yield known, tensor


def folders_stream(path: Path, folders: Sequence[str]) -> TensorStream:
    """The tensors of these folders in a model's, with the folder's name before their own."""
    for folder in folders:
        yield from within(folder, checkpoint_stream(path / folder))


def within(folder: str, stream: TensorStream) -> TensorStream:
    for name, tensor in stream:
        yield f"{folder}.{name}", tensor


def stored_tensors(shard: Path, wanted: Callable[[str], bool] = lambda _: True) -> TensorStream:
    """The tensors of a file whose stored names are wanted, by these. Raises ModelError.

    Maps a safetensors file anew after every _MAPPED_BYTES read, because what was read of a mapped file counts as memory
    in use until it is unmapped.
    """
    if is_pickled(shard):
        tensors = unpickled(shard)
        yield from ((name, tensors.pop(name)) for name in [*tensors] if wanted(name))
        return
    try:
        with safe_open(shard, framework="pt") as file:
            names = [name for name in reversed(file.keys()) if wanted(name)]
        while names:
            with safe_open(shard, framework="pt") as file:
                read = 0
                while names and read < _MAPPED_BYTES:
                    tensor = file.get_tensor(name := names.pop())
                    read += tensor.nbytes
                    yield name, tensor
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model: {shard.name} cannot be read: {error}") from error


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of PyTorch's own format, of which nothing else is read; mapped, where it is no older than
    PyTorch 1.6. Raises ModelError."""
    with open_needed(file) as opened:
        maps = zipfile.is_zipfile(opened)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=maps)
    except Exception as error:  # a broken file raises nearly anything
        raise ModelError(f"model: {file.name} cannot be read: {str(error).partition('.')[0][:200]}") from error
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise ModelError(f"model: {file.name} does not hold tensors by name")
    return {str(name): each.detach() for name, each in content.items()}


def dummy_stream(table: ParameterTable, seed: int, device: torch.device) -> TensorStream:
    """Random weights of the right shapes, made on the device: matrices of variance 1 / fan-in, vectors and
    single numbers near one."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in table.items():
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=device).normal_(generator=generator)
        if len(parameter.shape) < 2:
            yield name, noise * 0.02 if name.endswith("bias") else 1 + noise * 0.02
        else:
            yield name, noise * parameter.shape[-1] ** -0.5


def _listing(names: list[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name[:_NAMED_CHARACTERS] for name in names[:_NAMED]) + more
