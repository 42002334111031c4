"""Converts GGUF blocks to grouped weights of exactly the same values. Rows are in bytes. Source: ggml-common.h and
ggml-quants.c, https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire.engine.gguf.tensor_types import GGMLType
from quire.engine.layers.schemes import TensorSpec
from quire.engine.layers.schemes import gguf_codebooks as codebooks
from quire.engine.layers.schemes.floats import DOUBLED_E2M1_VALUES, decode_halved_e8m0_scales
from quire.engine.layers.schemes.gguf_bits import (
    make_nested_weight,
    pack_nibbles,
    read_float16,
    to_signed,
    unpack_code_planes,
    unpack_nibbles,
    unpack_single_bits,
)
from quire.engine.layers.schemes.mixed import LinearFormat
from quire.kernels.quantized_tensors import GroupedWeight, NestedScales

_UINT4_VALUES = tuple(range(16))
_Q2_K_VALUES = (0, 1, 2, 3)
_Q3_K_VALUES = (-4, -3, -2, -1, 0, 1, 2, 3)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GGUFFormat(LinearFormat):
    tensor_type: GGMLType
    input_order: Tensor | None = field(default=None, compare=False)
    scale: float = 1.0
    """Factor of all weights."""

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        shape = (out_features, in_features // self.tensor_type.block_size * self.tensor_type.type_size)
        return {"weight": TensorSpec(shape, torch.uint8)}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        weight = blocks_to_grouped_weight(tensors["weight"], self.tensor_type.name)
        scales = weight.scales if self.scale == 1.0 else weight.scales * self.scale
        return replace(weight, scales=scales, input_order=self.input_order)


def blocks_to_grouped_weight(rows: Tensor, kind: str) -> GroupedWeight:
    """`rows` [out, bytes] uint8."""
    size, unpack = _CONVERTERS_BY_TYPE[kind]
    return unpack(rows.view(rows.shape[0], -1, size))


def _q4_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(pack_nibbles(unpack_nibbles(blocks[..., 2:])), read_float16(blocks[..., :2]))


def _q4_1_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = pack_nibbles(unpack_nibbles(blocks[..., 4:]))
    return GroupedWeight(codes, read_float16(blocks[..., :2]), read_float16(blocks[..., 2:4]), _UINT4_VALUES)


def _q5_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = unpack_nibbles(blocks[..., 6:]) | unpack_single_bits(blocks[..., 2:6]) << 4
    return GroupedWeight(to_signed(codes, 16), read_float16(blocks[..., :2]))


def _q5_1_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = unpack_nibbles(blocks[..., 8:]) | unpack_single_bits(blocks[..., 4:8]) << 4
    return GroupedWeight(to_signed(codes, 0), read_float16(blocks[..., :2]), read_float16(blocks[..., 2:4]))


def _q8_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), read_float16(blocks[..., :2]))


def _q2_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    d, least = read_float16(blocks[..., 80:82], keepdim=True), read_float16(blocks[..., 82:84], keepdim=True)
    steps = blocks[..., :16].view(torch.int8)
    codes = unpack_code_planes(blocks[..., 16:80], (0, 2, 4, 6), 3)
    scales = NestedScales(d.squeeze(2), (steps & 15).flatten(1))
    return make_nested_weight(
        codes, _Q2_K_VALUES, scales, NestedScales(-least.squeeze(2), (steps >> 4 & 15).flatten(1))
    )


def _q3_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low = unpack_code_planes(blocks[..., 32:96], (0, 2, 4, 6), 3)
    high = unpack_code_planes(blocks[..., :32], range(8), 1)
    packed = blocks[..., 96:108]
    steps = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    steps |= torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1) << 4
    nested = NestedScales(read_float16(blocks[..., 108:110]), (steps.to(torch.int8) - 32).flatten(1))
    return make_nested_weight(low | high << 2, _Q3_K_VALUES, nested)


def _q4_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = unpack_code_planes(blocks[..., 16:], (0, 4), 15)
    return GroupedWeight(pack_nibbles(codes), *_decode_k_scales_and_offsets(blocks), _UINT4_VALUES)


def _q5_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low, high = unpack_code_planes(blocks[..., 48:], (0, 4), 15), unpack_code_planes(blocks[..., 16:48], range(8), 1)
    return GroupedWeight(to_signed(low | high << 4, 0), *_decode_k_scales_and_offsets(blocks))


def _q6_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low = unpack_code_planes(blocks[..., :128], (0, 4), 15, width=64)
    high = unpack_code_planes(blocks[..., 128:192], (0, 2, 4, 6), 3)
    scales = read_float16(blocks[..., 208:210], keepdim=True) * blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedWeight(to_signed(low | high << 4, 32), scales.flatten(1))


def _iq4_nl_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(
        pack_nibbles(unpack_nibbles(blocks[..., 2:])), read_float16(blocks[..., :2]), None, _IQ4_VALUES
    )


def _iq4_xs_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    high = blocks[..., 2:4].contiguous().view(torch.int16).int()
    steps = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2).int()
    steps = steps | (high >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device) & 3) << 4
    codes = unpack_nibbles(blocks[..., 8:].unflatten(-1, (8, 16)).flatten(1, 2))
    nested = NestedScales(read_float16(blocks[..., :2]), (steps - 32).to(torch.int8).flatten(1))
    return make_nested_weight(codes, _IQ4_VALUES, nested)


def _mxfp4_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(
        pack_nibbles(unpack_nibbles(blocks[..., 1:])),
        decode_halved_e8m0_scales(blocks[..., 0]),
        None,
        DOUBLED_E2M1_VALUES,
    )


def _nvfp4_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    """Scales are unsigned e4m3, and are halved because values are doubled."""
    bits = blocks[..., :4].int()
    exponents, mantissas = bits >> 3 & 15, bits & 7
    scales = torch.ldexp((mantissas + 8 * (exponents > 0)).float(), exponents.clamp(min=1) - 11)
    scales = scales.masked_fill(bits == 0x7F, 0.0)
    codes = unpack_nibbles(blocks[..., 4:].unflatten(-1, (4, 8)).flatten(1, 2))
    return GroupedWeight(pack_nibbles(codes), scales.flatten(1), None, DOUBLED_E2M1_VALUES)


_CONVERTERS_BY_TYPE: dict[str, tuple[int, Callable[[Tensor], GroupedWeight]]] = {
    "Q4_0": (18, _q4_0_to_grouped_weight),
    "Q4_1": (20, _q4_1_to_grouped_weight),
    "Q5_0": (22, _q5_0_to_grouped_weight),
    "Q5_1": (24, _q5_1_to_grouped_weight),
    "Q8_0": (34, _q8_0_to_grouped_weight),
    "Q2_K": (84, _q2_k_to_grouped_weight),
    "Q3_K": (110, _q3_k_to_grouped_weight),
    "Q4_K": (144, _q4_k_to_grouped_weight),
    "Q5_K": (176, _q5_k_to_grouped_weight),
    "Q6_K": (210, _q6_k_to_grouped_weight),
    "IQ4_NL": (18, _iq4_nl_to_grouped_weight),
    "IQ4_XS": (136, _iq4_xs_to_grouped_weight),
    "MXFP4": (17, _mxfp4_to_grouped_weight),
    "NVFP4": (36, _nvfp4_to_grouped_weight),
    "IQ2_XXS": (66, codebooks.iq2_xxs_to_grouped_weight),
    "IQ2_XS": (74, codebooks.iq2_xs_to_grouped_weight),
    "IQ2_S": (82, codebooks.iq2_s_to_grouped_weight),
    "IQ3_XXS": (98, codebooks.iq3_xxs_to_grouped_weight),
    "IQ3_S": (110, codebooks.iq3_s_to_grouped_weight),
    "IQ1_S": (50, codebooks.iq1_s_to_grouped_weight),
    "IQ1_M": (56, codebooks.iq1_m_to_grouped_weight),
    "TQ1_0": (54, codebooks.tq1_0_to_grouped_weight),
    "TQ2_0": (66, codebooks.tq2_0_to_grouped_weight),
}
"""For each type, the bytes per block, and a function that converts blocks, which are [out, blocks, bytes] uint8."""
SUPPORTED_QUANT_TYPES = frozenset(_CONVERTERS_BY_TYPE)


def _decode_k_scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes 6-bit multiples of two float16 numbers that eight groups share."""
    d, least = read_float16(blocks[..., :2], keepdim=True), read_float16(blocks[..., 2:4], keepdim=True)
    first, second, last = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    steps = torch.cat((first & 63, last & 15 | first >> 2 & 48), -1)
    down = torch.cat((second & 63, last >> 4 | second >> 2 & 48), -1)
    return (d * steps).flatten(1), -(least * down).flatten(1)
