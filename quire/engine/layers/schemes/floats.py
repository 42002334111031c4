from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from quire.engine.checkpoint.quantization import WeightFormat
from quire.engine.common.errors import ModelError
from quire.engine.layers.schemes import TensorSpec
from quire.engine.layers.schemes.integers import broadcast_to_groups
from quire.engine.layers.schemes.mixed import LinearFormat
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight

_QUANT_STATE_PREFIX = "weight.quant_state.bitsandbytes__"
_ABSMAX, _QUANT_MAP = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"


DOUBLED_E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of e2m1 by code, doubled so that they are integers."""
_Dimension = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


class _QuantState(msgspec.Struct):
    blocksize: _Dimension
    shape: tuple[_Dimension, _Dimension]
    nested_blocksize: _Dimension = 1
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Float8Format(LinearFormat):
    """e4m3 with scales per tensor, output, group or block. MXFP8 has a power-of-two scale per 32 inputs."""

    weight_format: WeightFormat
    scale_spec: TensorSpec

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        codes = TensorSpec((out_features, in_features), torch.float8_e4m3fn)
        return {"weight": codes, self.weight_format.scale_name: self.scale_spec}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> Float8Weight:
        codes, scales = tensors["weight"], tensors[self.weight_format.scale_name]
        scales = 2 * decode_halved_e8m0_scales(scales) if self.weight_format.has_exponent_scales else scales.float()
        outs, inner = codes.shape
        where, strategy = f"{linear}.{self.weight_format.scale_name}", self.weight_format.scale_strategy
        if strategy == "block":
            block = self.weight_format.block_shape
            if scales.ndim == 4:  # ModelOpt's [blocks of outputs, 1, blocks of inputs, 1]
                scales = scales[:, 0, :, 0].contiguous()
            if tuple(scales.shape) != (-(-outs // block[0]), -(-inner // block[1])):
                raise ModelError(f"model: {where} has shape {list(scales.shape)}, for blocks of {list(block)}")
        elif strategy == "group":
            if inner % self.weight_format.group_size:
                raise ModelError(
                    f"model: {where}: {inner} inputs are not a multiple of groups of {self.weight_format.group_size}"
                )
            block = (1, self.weight_format.group_size)
            scales = broadcast_to_groups(scales, codes.shape, self.weight_format.group_size, where).contiguous()
        elif scales.numel() == 1:
            block, scales = (outs, inner), scales.reshape(1, 1)
        else:
            block, scales = (1, inner), broadcast_to_groups(scales, codes.shape, 0, where).contiguous()
        return Float8Weight(codes, scales, block)


@dataclass(frozen=True, slots=True)
class Float4Format(LinearFormat):
    """e2m1, low nibble first. MXFP4 has a power-of-two scale per 32 inputs. NVFP4 has an e4m3 scale per 16 inputs, and
    a global scale: a factor in ModelOpt's checkpoints, a divisor in those of compressed-tensors.
    """

    weight_format: WeightFormat
    global_scale: TensorSpec | None = None
    """For NVFP4: one element."""

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        codes_name, global_scale_name = _float4_names(self.weight_format)
        scale_dtype = torch.uint8 if self.global_scale is None else torch.float8_e4m3fn
        specs = {
            codes_name: TensorSpec((out_features, in_features // 2), torch.uint8),
            "weight_scale": TensorSpec((out_features, -(-in_features // self.weight_format.group_size)), scale_dtype),
        }
        return specs if self.global_scale is None else specs | {global_scale_name: self.global_scale}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        codes_name, global_scale_name = _float4_names(self.weight_format)
        codes, scales = tensors[codes_name], tensors["weight_scale"]
        if codes.shape[1] * 2 != scales.shape[1] * self.weight_format.group_size:
            raise ModelError(
                f"model: {linear}: {codes.shape[1] * 2} inputs are not a multiple of {self.weight_format.group_size}"
            )
        if self.global_scale is None:
            return GroupedWeight(codes, decode_halved_e8m0_scales(scales), None, DOUBLED_E2M1_VALUES)
        global_scale = tensors[global_scale_name].reshape(1)
        scales = scales.float() * global_scale if self.weight_format.is_modelopt else scales.float() / global_scale
        return GroupedWeight(codes, scales / 2, None, DOUBLED_E2M1_VALUES)


def _float4_names(weight_format: WeightFormat) -> tuple[str, str]:
    return ("weight", "weight_scale_2") if weight_format.is_modelopt else ("weight_packed", "weight_global_scale")


def float4_format_from_headers(
    weight_format: WeightFormat, headers: dict[str, TensorSpec], linear: str
) -> Float4Format:
    """Raises ModelError for a missing or misshapen global scale."""
    if weight_format.scale_strategy != "tensor_group":
        return Float4Format(weight_format)
    name = _float4_names(weight_format)[1]
    if name not in headers:
        raise ModelError(f"model: the weights lack {linear}.{name}")
    shape = headers[name].shape
    if math.prod(shape) != 1:
        raise ModelError(f"model: {linear}.{name} has shape {list(shape)}, and a linear has one global scale")
    return Float4Format(weight_format, TensorSpec(shape, torch.float32))


def decode_halved_e8m0_scales(exponents: Tensor) -> Tensor:
    """Returns 2 ** (exponent - 128) in float32. This is half the scale, because DOUBLED_E2M1_VALUES are doubled."""
    exponents = exponents.int()
    # The results for the two smallest exponents are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


@dataclass(frozen=True, slots=True)
class BitsAndBytesInt8Format(LinearFormat):
    """LLM.int8(): code 127 stands for the largest absolute weight of an output."""

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        codes = TensorSpec((out_features, in_features), torch.int8)
        return {"weight": codes, "SCB": TensorSpec((out_features,), torch.float32)}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        return GroupedWeight(tensors["weight"], (tensors["SCB"] / 127).unsqueeze(1))


@dataclass(frozen=True, slots=True)
class BitsAndBytes4BitFormat(LinearFormat):
    """NF4 or FP4. Nibbles, high one first, are indices of a table of 16 floats. absmax, which may itself be in 8-bit
    codes, scales each block of flattened weights. Weights are dequantized, because no kernel has tables of floats.
    """

    quant_type: str
    extra_specs: dict[str, TensorSpec]

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((in_features * out_features // 2, 1), torch.uint8)} | self.extra_specs

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> Tensor:
        state = self._parse_quant_state(tensors[f"{_QUANT_STATE_PREFIX}{self.quant_type}"], linear)
        absmax = tensors[_ABSMAX]
        if absmax.dtype == torch.uint8:
            nested = tensors[_NESTED_MAP][absmax.long()]
            largest = tensors[_NESTED_ABSMAX].repeat_interleave(state.nested_blocksize)[: len(nested)]
            absmax = nested * largest + state.nested_offset
        codes = tensors["weight"].flatten()
        halves = torch.stack((codes >> 4, codes & 15), dim=-1).flatten()
        numbers = tensors[_QUANT_MAP][halves.int()]
        scales = absmax.float().repeat_interleave(state.blocksize)[: len(numbers)]
        if len(scales) != len(numbers) or state.shape[0] * state.shape[1] != len(numbers):
            raise ModelError(f"model: {linear}.{_ABSMAX} has {len(absmax)} numbers for {len(numbers)} weights")
        return (numbers * scales).view(*state.shape)

    def _parse_quant_state(self, stored: Tensor, linear: str) -> _QuantState:
        try:
            return msgspec.json.decode(bytes(stored.tolist()), type=_QuantState)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ModelError(f"model: {linear}.{_QUANT_STATE_PREFIX}{self.quant_type}: cannot be read") from None


def bitsandbytes_4bit_format_from_headers(headers: dict[str, TensorSpec], linear: str) -> BitsAndBytes4BitFormat:
    """Raises ModelError for missing tensors."""
    quant_type = next(
        (name.removeprefix(_QUANT_STATE_PREFIX) for name in headers if name.startswith(_QUANT_STATE_PREFIX)), None
    )
    if quant_type is None:
        raise ModelError(f"model: the weights lack {linear}.{_QUANT_STATE_PREFIX}nf4")
    extra_specs = {name: each for name, each in headers.items() if name not in ("weight", "bias")}
    required = [_ABSMAX, _QUANT_MAP]
    if extra_specs.get(_ABSMAX, TensorSpec((), torch.float32)).dtype == torch.uint8:
        required += [_NESTED_ABSMAX, _NESTED_MAP]
    if missing := [name for name in required if name not in extra_specs]:
        raise ModelError(f"model: the weights lack {linear}.{missing[0]}")
    return BitsAndBytes4BitFormat(quant_type, extra_specs)
