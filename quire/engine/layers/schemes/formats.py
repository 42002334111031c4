from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice, takewhile

import torch

from quire.engine.architecture.decoder import LM_HEAD
from quire.engine.checkpoint.quantization import WeightFormat, WeightFormatRules
from quire.engine.checkpoint.tensor_headers import TensorHeader
from quire.engine.common.errors import ModelError
from quire.engine.layers.schemes import TensorSpec
from quire.engine.layers.schemes.floats import (
    BitsAndBytesInt8Format,
    Float8Format,
    bitsandbytes_4bit_format_from_headers,
    float4_format_from_headers,
)
from quire.engine.layers.schemes.integers import AWQFormat, GPTQFormat, Int8Format, PackQuantizedFormat
from quire.engine.layers.schemes.mixed import LinearFormat

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def make_format_lookup(
    formats: WeightFormatRules,
    headers: Mapping[str, TensorHeader],
    config_name_of: Callable[[str], str],
    *,
    is_extra_layer: bool = False,
) -> Callable[[str], LinearFormat | None]:
    """The lookup returns None for unquantized linears. `is_extra_layer`: an MTP layer may be unquantized although
    config.json does not say so.
    """
    names = sorted(headers)

    def read_tensor_specs(linear: str) -> dict[str, TensorSpec]:
        prefix = f"{linear}."
        first = bisect_left(names, prefix)
        prefixed_names = takewhile(lambda name: name.startswith(prefix), islice(names, first, None))
        linear_headers = {name.removeprefix(prefix): headers[name] for name in prefixed_names}
        return {
            name: TensorSpec(each.shape, SAFETENSORS_DTYPES.get(each.dtype, torch.float64))
            for name, each in linear_headers.items()
        }

    def format_of(linear: str) -> LinearFormat | None:
        weight_format, tensors = formats.find_format(config_name_of(linear)), read_tensor_specs(linear)
        may_be_unquantized = is_extra_layer or linear == LM_HEAD or formats.trusts_stored_dtypes
        if weight_format is None or (may_be_unquantized and _is_stored_unquantized(tensors)):
            return None
        return _make_format(weight_format, tensors, linear)

    return format_of


def _make_format(weight_format: WeightFormat, specs: dict[str, TensorSpec], linear: str) -> LinearFormat:
    def require_spec(name: str) -> TensorSpec:
        if name not in specs:
            raise ModelError(f"model: the weights lack {linear}.{name}, which quantization_config means")
        return specs[name]

    def float_spec(name: str) -> TensorSpec:
        return TensorSpec(require_spec(name).shape, torch.float32)

    match weight_format.kind:
        case "gptq":
            return GPTQFormat(weight_format, has_group_index="g_idx" in specs)
        case "awq":
            return AWQFormat(weight_format)
        case "packed":
            shape_dtype = require_spec("weight_shape").dtype
            return PackQuantizedFormat(
                weight_format, float_spec("weight_scale"), shape_dtype, has_group_index="weight_g_idx" in specs
            )
        case "int8":
            zero = None if weight_format.is_symmetric else specs.get("weight_zero_point")
            return Int8Format(weight_format, float_spec("weight_scale"), zero)
        case "float8":
            scale_spec = float_spec(weight_format.scale_name)
            if weight_format.has_exponent_scales:
                scale_spec = TensorSpec(scale_spec.shape, torch.uint8)
            return Float8Format(weight_format, scale_spec)
        case "float4":
            return float4_format_from_headers(weight_format, specs, linear)
        case "bnb8":
            return BitsAndBytesInt8Format()
        case _:
            return bitsandbytes_4bit_format_from_headers(specs, linear)


def _is_stored_unquantized(specs: dict[str, TensorSpec]) -> bool:
    weight = specs.get("weight")
    return not specs or (weight is not None and weight.dtype.is_floating_point and weight.dtype.itemsize > 1)
