"""Finds weight files and reads their headers, in safetensors' (https://huggingface.co/docs/safetensors) or PyTorch's
format.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from quire.engine.checkpoint import pickled
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import MIB, decode_json, open_if_present, read_bytes_if_present
from quire.engine.common.safetensors_dtypes import DTYPE_BYTES, FLOAT_BYTES
from quire.engine.gguf.hf_config import EMBEDDING_TENSOR
from quire.engine.gguf.model_files import read_gguf_header
from quire.engine.gguf.tensor_types import FLOAT_TYPES

INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * MIB
_MAX_HEADER_BYTES = 100_000_000
_MAX_TENSORS = 2**17
_MAX_SHARDS = 4096
_MAX_SHOWN_CHARS = 200
_MTP_PREFIXES = ("mtp.",)
_NON_TEXT_PREFIXES = ("model.visual.", "visual.", "model.audio_tower.", "model.embed_audio.", *_MTP_PREFIXES)
_VISION_NAME_PARTS = (
    "vision_tower.",
    "embed_vision.",
    "multi_modal_projector.",
    "vision_model.",
    "visual_projection.",
    "model.connector.",
    "image_newline",
)
ROUTED_EXPERT_PATTERN = re.compile(r"\.experts\.|_exps\.|\.block_sparse_moe\.(in|out)put_linear\.")
"""Also matches GGUF's and Granite's names."""
LAYER_PATTERN = re.compile(r"(^|\.)(layers|h|blk|blocks)\.\d+\.")
_Size = Annotated[int, Meta(ge=0, le=2**62)]


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


class TensorHeader(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class CheckpointSize(NamedTuple):
    num_floats: int
    """Elements of 16 bits or more, which are cast when loaded."""
    packed_bytes: int
    """Bytes of packed integers and 8-bit floats, which are loaded unchanged."""
    embedding_bits: float | None = None
    """Bits per element of a quantized embedding, which may be the tied head."""
    cpu_expansion: int = 0
    """Bytes that packed tensors take in a CPU's memory beyond packed_bytes."""
    gpu_expansion: int = 0


def text_tensor_name(name: str) -> str | None:
    """Return the name in a text-only model; None for tensors of image towers and MTP heads."""
    if name.startswith(_NON_TEXT_PREFIXES) or any(part in name for part in _VISION_NAME_PARTS):
        return None
    return name.replace("language_model.", "").replace("text_model.", "")


def is_text_tensor(name: str) -> bool:
    return text_tensor_name(name) is not None


def vision_tensor_name(name: str) -> str | None:
    """Removes optional prefixes. None for tensors outside image towers."""
    if text_tensor_name(name) is not None or name.startswith(_MTP_PREFIXES):
        return None
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def find_weight_files(path: Path) -> list[Path]:
    """The returned files need not exist. Raises ModelError for an invalid index, or for a path outside the model's
    folder. Symbolic links may lead anywhere.
    """
    single, name = path / "model.safetensors", INDEX_FILE
    content = read_bytes_if_present(path / name, _MAX_INDEX_BYTES)
    if content is None and not os.path.lexists(single):
        name = pickled.INDEX_FILE
        content = read_bytes_if_present(path / name, _MAX_INDEX_BYTES)
        single = path / pickled.WEIGHTS_FILE if os.path.lexists(path / pickled.WEIGHTS_FILE) else single
    if content is None:
        return [single]
    shards = sorted(set(decode_json(content, _ShardIndex, name).weight_map.values()))
    if not 0 < len(shards) <= _MAX_SHARDS:
        raise ModelError(f"model: {name}: weight_map: names {len(shards)} files")
    for shard in shards:
        if (
            len(shard) > _MAX_SHOWN_CHARS
            or not shard.isprintable()
            or PurePosixPath(shard).is_absolute()
            or ".." in PurePosixPath(shard).parts
        ):
            raise ModelError(
                f"model: {name}: weight_map: {shard[:_MAX_SHOWN_CHARS]!r} is not a file in the model's folder"
            )
    return [path / shard for shard in shards]


def is_pickled(file: Path) -> bool:
    return file.suffix == pickled.SUFFIX


def read_checkpoint_size(
    path: Path, is_counted: Callable[[str], bool] = is_text_tensor, *, excluded_pattern: re.Pattern[str] | None = None
) -> CheckpointSize | None:
    """Reads only headers. None if a file is missing. Raises ModelError."""
    if not path.is_dir():
        return _read_gguf_size(path, is_counted, excluded_pattern)
    floats = packed_bytes = 0
    for shard in find_weight_files(path):
        tensors = _read_shard_header(shard)
        if tensors is None:
            return None
        for name, tensor in tensors.items():
            if name.endswith("rotary_emb.inv_freq") or not is_counted(name):
                continue
            if excluded_pattern is not None and excluded_pattern.search(name):
                continue
            begin, end = tensor.data_offsets
            if tensor.dtype in FLOAT_BYTES:
                floats += (end - begin) // FLOAT_BYTES[tensor.dtype]
            else:
                packed_bytes += end - begin
    return CheckpointSize(floats, packed_bytes)


def read_tensor_headers(
    path: Path, map_name: Callable[[str], str | None] = text_tensor_name
) -> dict[str, TensorHeader]:
    """`map_name` returns None to skip a tensor. Raises ModelError."""
    headers = {}
    for shard in find_weight_files(path):
        for stored_name, tensor in (_read_shard_header(shard) or {}).items():
            if (name := map_name(stored_name)) is not None:
                headers[name] = TensorHeader(tensor.dtype, tuple(tensor.shape))
    return headers


def read_file_headers(file: Path) -> dict[str, TensorHeader] | None:
    """None if there is no file. Raises ModelError."""
    tensors = _read_shard_header(file)
    if tensors is None:
        return None
    return {name: TensorHeader(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def read_tensor_ranges(file: Path) -> dict[str, tuple[str, int, int]]:
    """By name: dtype, first byte, and the byte after the last. Raises ModelError."""
    tensors = _read_shard_header(file) or {}
    with file.open("rb") as stream:
        data_start = 8 + int.from_bytes(stream.read(8), "little")
    offsets = {name: (tensor.dtype, *tensor.data_offsets) for name, tensor in tensors.items()}
    return {name: (dtype, data_start + begin, data_start + end) for name, (dtype, begin, end) in offsets.items()}


def _read_gguf_size(
    path: Path, is_counted: Callable[[str], bool], excluded_pattern: re.Pattern[str] | None
) -> CheckpointSize:
    """Quantized tensors stay quantized, so they count as packed bytes."""
    floats = packed_bytes = 0
    cpu_bytes = gpu_bytes = 0.0
    tensors = {name: tensor for name, tensor in read_gguf_header(path).tensors.items() if is_counted(name)}
    for name, tensor in tensors.items():
        if excluded_pattern is not None and excluded_pattern.search(name):
            continue
        if (form := tensor.type.held_form) is None:
            floats += tensor.num_elements
        else:
            packed_bytes += tensor.nbytes
            cpu_bytes += tensor.num_elements * form.bits_per_weight(gpu=False) / 8
            gpu_bytes += tensor.num_elements * form.bits_per_weight(gpu=True) / 8
    embedding = tensors.get(EMBEDDING_TENSOR)
    return CheckpointSize(
        floats,
        packed_bytes,
        None if embedding is None or embedding.type.name in FLOAT_TYPES else embedding.type.bits_per_weight,
        round(cpu_bytes) - packed_bytes,
        round(gpu_bytes) - packed_bytes,
    )


def _read_shard_header(shard: Path) -> dict[str, _TensorEntry] | None:
    """A safetensors file starts with the header's length in eight little-endian bytes, then has JSON."""
    if is_pickled(shard):
        pickled_tensors = pickled.read_pickled_tensor_headers(shard)
        if pickled_tensors is None:
            return None
        return {
            name: _TensorEntry(each.dtype, [*each.shape], (0, each.nbytes)) for name, each in pickled_tensors.items()
        }
    file = open_if_present(shard)
    if file is None:
        return None
    with file:
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > min(total - 8, _MAX_HEADER_BYTES):
            raise ModelError(
                f"model: {shard.name} cannot be read: its header is cut off, or it is not a safetensors file"
            )
        header = decode_json(file.read(length), dict[str, msgspec.Raw], shard.name)
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise ModelError(f"model: {shard.name}: its header has {len(header)} tensors, more than {_MAX_TENSORS}")
    tensors = {
        name: decode_json(bytes(raw), _TensorEntry, f"{shard.name}: {name[:_MAX_SHOWN_CHARS]}")
        for name, raw in header.items()
    }
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        if not begin <= end <= total - 8 - length:
            raise ModelError(
                f"model: {shard.name}: {name[:_MAX_SHOWN_CHARS]}: data_offsets: outside of the file, which may be cut "
                "off"
            )
        needed = math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, 0)
        if tensor.dtype in DTYPE_BYTES and needed != end - begin:
            size = f"{tensor.shape} of {tensor.dtype} are {needed} bytes, not {end - begin}"
            raise ModelError(f"model: {shard.name}: {name[:_MAX_SHOWN_CHARS]}: data_offsets: {size}")
    _check_no_overlap(tensors, shard.name)
    return tensors


def _check_no_overlap(tensors: dict[str, _TensorEntry], shard: str) -> None:
    """The safetensors library refuses overlapping tensors, too."""
    ranges = sorted((tensor.data_offsets, name) for name, tensor in tensors.items())
    for ((_, end), previous_name), ((begin, _), name) in pairwise(ranges):
        if begin < end:
            raise ModelError(
                f"model: {shard}: {name[:_MAX_SHOWN_CHARS]}: data_offsets: shares bytes with "
                f"{previous_name[:_MAX_SHOWN_CHARS]}"
            )
