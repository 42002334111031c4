"""The format of each linear of a checkpoint: what quantization_config says, and what the tensors' headers add to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice, takewhile

import torch

from quire.engine.checkpoint.quantization import WeightFormat, WeightFormats
from quire.engine.checkpoint.safetensors import TensorHeader
from quire.engine.errors import ModelError
from quire.engine.layers.schemes import Stored
from quire.engine.layers.schemes.floats import Bnb8, Float4, Float8, bnb4
from quire.engine.layers.schemes.integers import Awq, Gptq, Int8, Packed
from quire.engine.layers.schemes.mixed import Format

_HEAD = "lm_head"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


def formats_of(
    formats: WeightFormats, headers: Mapping[str, TensorHeader], stored: Callable[[str], str], *, beside: bool = False
) -> Callable[[str], Format | None]:
    """The format of a linear by its name; None: it is not quantized. headers: of all the checkpoint's tensors; stored:
    what config.json calls a linear. beside: they are of a layer beside the model's, of which config.json may not say
    that it is not quantized, as it may not of a head."""
    names = sorted(headers)

    def tensors_of(linear: str) -> dict[str, Stored]:
        prefix = f"{linear}."
        first = bisect_left(names, prefix)
        found = takewhile(lambda name: name.startswith(prefix), islice(names, first, None))
        own = {name.removeprefix(prefix): headers[name] for name in found}
        return {name: Stored(each.shape, _DTYPES.get(each.dtype, torch.float64)) for name, each in own.items()}

    def format_of(linear: str) -> Format | None:
        weight_format, tensors = formats.of(stored(linear)), tensors_of(linear)
        if weight_format is None or ((beside or linear == _HEAD) and _is_plain(tensors)):
            return None
        return _made(weight_format, tensors, linear)

    return format_of


def _made(weight_format: WeightFormat, beside: dict[str, Stored], linear: str) -> Format:
    def needed(name: str) -> Stored:
        if name not in beside:
            raise ModelError(f"model: the weights lack {linear}.{name}, which quantization_config means")
        return beside[name]

    def floats(name: str) -> Stored:
        return Stored(needed(name).shape, torch.float32)

    match weight_format.kind:
        case "gptq":
            return Gptq(weight_format, ordered="g_idx" in beside)
        case "awq":
            return Awq(weight_format)
        case "packed":
            sides = needed("weight_shape").dtype
            return Packed(weight_format, floats("weight_scale"), sides, ordered="weight_g_idx" in beside)
        case "int8":
            zero = None if weight_format.symmetric else beside.get("weight_zero_point")
            return Int8(weight_format, floats("weight_scale"), zero)
        case "float8":
            return Float8(weight_format, floats(weight_format.scale_name))
        case "float4":
            return Float4(weight_format)
        case "bnb8":
            return Bnb8()
        case _:
            return bnb4(beside, linear)


def _is_plain(beside: dict[str, Stored]) -> bool:
    """Whether these are the tensors of a linear in floating point: heads mostly are, and few files say it of them. A
    tied head has none."""
    weight = beside.get("weight")
    return not beside or (weight is not None and weight.dtype.is_floating_point and weight.dtype.itemsize > 1)
