"""Checks an adapter's numbers by their bits, because NumPy has no bfloat16. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quire.engine.architecture.decoder import LM_HEAD
from quire.engine.checkpoint.tensor_headers import find_weight_files, is_pickled, read_tensor_ranges, text_tensor_name
from quire.engine.common.errors import AdapterError
from quire.engine.families.base.weight_names import LAYER_MODULE_PATTERN

_EXPONENT_BITS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Integer dtype and exponent mask. Infinity and NaN have all bits of the mask set."""
_FLOAT_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_CHECKED_NUMBERS = 2**20
_TensorLocation = tuple[Path, str, int, int]
"""File, dtype, first and last byte."""


def check_finite(file: Path) -> None:
    """Raises AdapterError for infinity, NaN or integers."""
    content = np.memmap(file, dtype=np.uint8, mode="r")
    for name, (dtype, begin, end) in read_tensor_ranges(file).items():
        if dtype not in _EXPONENT_BITS:
            raise AdapterError(f"{file.name}: {name[:120]}: is stored as {dtype[:20]}, not as floating-point numbers")
        kind, exponent = _EXPONENT_BITS[dtype]
        bits = content[begin:end].view(kind)
        mask = bits.dtype.type(exponent)
        if any((bits[at : at + _CHECKED_NUMBERS] & mask == mask).any() for at in range(0, len(bits), _CHECKED_NUMBERS)):
            raise AdapterError(f"{file.name}: {name[:120]}: holds numbers that are infinite or NaN")


def check_base_weights(file: Path, names: Mapping[str, str], weights: Path | None) -> None:
    """Raises AdapterError unless base weights saved with an adapter equal the model's. `names`: modules by tensor
    name.
    """
    for tensor_name, module in names.items():
        where = f"{file.name}: {tensor_name[:120]}"
        location = None if weights is None or not weights.is_dir() else _find_model_weight(weights, module)
        if location is None:
            raise AdapterError(
                f"{where}: cannot be compared with the model's weights, and adapters that change them are not served"
            )
        if not _are_close((file, *read_tensor_ranges(file)[tensor_name]), location):
            raise AdapterError(
                f"{where}: differs from the model's weights: it cannot be served as an adapter; merge it into them"
            )


def _find_model_weight(weights: Path, module: str) -> _TensorLocation | None:
    locations: dict[str, _TensorLocation] = {}
    for shard in find_weight_files(weights):
        if is_pickled(shard) or not shard.is_file():
            continue
        for stored, location in read_tensor_ranges(shard).items():
            if stored.endswith(".weight") and (text := text_tensor_name(stored)) is not None:
                name = LAYER_MODULE_PATTERN.sub(r"model.layers.\1.\2", text.removesuffix(".weight"))
                locations[name.removeprefix("model.")] = (shard, *location)
    return locations.get(module.removeprefix("model.")) or (
        locations.get("embed_tokens") if module == LM_HEAD else None
    )


def _are_close(first: _TensorLocation, second: _TensorLocation) -> bool:
    """Tolerates differences from bfloat16 rounding (8 mantissa bits)."""
    numbers, others = _read_numbers(first), _read_numbers(second)
    if numbers is None or others is None or len(numbers) != len(others):
        return False
    for at in range(0, len(numbers), _CHECKED_NUMBERS):
        piece, other_piece = (
            _as_floats(numbers[at : at + _CHECKED_NUMBERS]),
            _as_floats(others[at : at + _CHECKED_NUMBERS]),
        )
        if not np.allclose(piece, other_piece, rtol=2**-7, atol=1e-30):
            return False
    return True


def _read_numbers(location: _TensorLocation) -> np.ndarray | None:
    """Returns bfloat16 as uint16."""
    file, dtype, begin, end = location
    if dtype not in _FLOAT_DTYPES:
        return None
    return np.memmap(file, dtype=np.uint8, mode="r")[begin:end].view(_FLOAT_DTYPES[dtype])


def _as_floats(numbers: np.ndarray) -> np.ndarray:
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
