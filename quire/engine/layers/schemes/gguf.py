"""GGUF blocks as grouped weights of exactly the same values. Functions take rows as bytes. Source: ggml-common.h and
ggml-quants.c, https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire.engine.gguf.tensor_types import GGMLType
from quire.engine.layers.schemes import TensorSpec
from quire.engine.layers.schemes.floats import DOUBLED_E2M1_VALUES, decode_halved_e8m0_scales
from quire.engine.layers.schemes.mixed import LinearFormat
from quire.kernels.quantized_tensors import GroupedWeight

_UINT4_VALUES = tuple(range(16))
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GGUFFormat(LinearFormat):
    tensor_type: GGMLType
    input_order: Tensor | None = field(default=None, compare=False)

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        shape = (out_features, in_features // self.tensor_type.block_size * self.tensor_type.type_size)
        return {"weight": TensorSpec(shape, torch.uint8)}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        return replace(blocks_to_grouped_weight(tensors["weight"], self.tensor_type.name), input_order=self.input_order)


def blocks_to_grouped_weight(rows: Tensor, kind: str) -> GroupedWeight:
    """`rows` [out, bytes] uint8."""
    size, unpack = _CONVERTERS_BY_TYPE[kind]
    return unpack(rows.view(rows.shape[0], -1, size))


def _q4_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(_pack_nibbles(_unpack_nibbles(blocks[..., 2:])), _read_float16(blocks[..., :2]))


def _q4_1_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = _pack_nibbles(_unpack_nibbles(blocks[..., 4:]))
    return GroupedWeight(codes, _read_float16(blocks[..., :2]), _read_float16(blocks[..., 2:4]), _UINT4_VALUES)


def _q5_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = _unpack_nibbles(blocks[..., 6:]) | _unpack_single_bits(blocks[..., 2:6]) << 4
    return GroupedWeight(_to_signed(codes, 16), _read_float16(blocks[..., :2]))


def _q5_1_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = _unpack_nibbles(blocks[..., 8:]) | _unpack_single_bits(blocks[..., 4:8]) << 4
    return GroupedWeight(_to_signed(codes, 0), _read_float16(blocks[..., :2]), _read_float16(blocks[..., 2:4]))


def _q8_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _read_float16(blocks[..., :2]))


def _q2_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    d, least = _read_float16(blocks[..., 80:82], 1), _read_float16(blocks[..., 82:84], 1)
    steps = blocks[..., :16]
    codes = _unpack_code_planes(blocks[..., 16:80], (0, 2, 4, 6), 3)
    scales, offsets = d * (steps & 15), -(least * (steps >> 4))
    return GroupedWeight(_pack_nibbles(codes), scales.flatten(1), offsets.flatten(1), _UINT4_VALUES)


def _q3_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low = _unpack_code_planes(blocks[..., 32:96], (0, 2, 4, 6), 3)
    high = _unpack_code_planes(blocks[..., :32], range(8), 1)
    packed = blocks[..., 96:108]
    steps = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    steps |= torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1) << 4
    scales = _read_float16(blocks[..., 108:110], 1) * (steps.to(torch.int8) - 32)
    # low - 4 if the high bit is unset, stored as code - 8
    return GroupedWeight(_pack_nibbles(low + 4 + (high << 2)), scales.flatten(1))


def _q4_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = _unpack_code_planes(blocks[..., 16:], (0, 4), 15)
    return GroupedWeight(_pack_nibbles(codes), *_decode_k_scales_and_offsets(blocks), _UINT4_VALUES)


def _q5_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low, high = _unpack_code_planes(blocks[..., 48:], (0, 4), 15), _unpack_code_planes(blocks[..., 16:48], range(8), 1)
    return GroupedWeight(_to_signed(low | high << 4, 0), *_decode_k_scales_and_offsets(blocks))


def _q6_k_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    low = _unpack_code_planes(blocks[..., :128], (0, 4), 15, width=64)
    high = _unpack_code_planes(blocks[..., 128:192], (0, 2, 4, 6), 3)
    scales = _read_float16(blocks[..., 208:210], 1) * blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedWeight(_to_signed(low | high << 4, 32), scales.flatten(1))


def _iq4_nl_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(
        _pack_nibbles(_unpack_nibbles(blocks[..., 2:])), _read_float16(blocks[..., :2]), None, _IQ4_VALUES
    )


def _iq4_xs_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    high = blocks[..., 2:4].contiguous().view(torch.int16).int()
    steps = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2).int()
    steps = steps | (high >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device) & 3) << 4
    codes = _unpack_nibbles(blocks[..., 8:].unflatten(-1, (8, 16)).flatten(1, 2))
    return GroupedWeight(
        _pack_nibbles(codes), (_read_float16(blocks[..., :2], 1) * (steps - 32)).flatten(1), None, _IQ4_VALUES
    )


def _mxfp4_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(
        _pack_nibbles(_unpack_nibbles(blocks[..., 1:])),
        decode_halved_e8m0_scales(blocks[..., 0]),
        None,
        DOUBLED_E2M1_VALUES,
    )


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
}
"""Bytes per block, and converter of [out, blocks, bytes]."""
SUPPORTED_QUANT_TYPES = frozenset(_CONVERTERS_BY_TYPE)


def _read_float16(data: Tensor, wider: int = 0) -> Tensor:
    """[..., blocks, 2] bytes to float32 [..., blocks], with `wider` [..., blocks, 1]."""
    numbers = data.contiguous().view(torch.float16).float()
    return numbers if wider else numbers.squeeze(-1)


def _unpack_nibbles(data: Tensor) -> Tensor:
    """[out, in] uint8; low nibbles hold a block's first half."""
    return torch.cat((data & 15, data >> 4), -1).flatten(1)


def _unpack_single_bits(data: Tensor) -> Tensor:
    """[out, blocks, bytes] to [out, in] uint8, lowest bit first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten(1)


def _unpack_code_planes(data: Tensor, shifts: range | tuple[int, ...], mask: int, width: int = 32) -> Tensor:
    """[out, blocks, bytes] to [out, in] uint8; `width` bytes hold a plane after another."""
    lines = data.unflatten(-1, (-1, 1, width)) >> torch.tensor(
        tuple(shifts), dtype=torch.uint8, device=data.device
    ).view(-1, 1)
    return (lines & mask).flatten(1)


def _decode_k_scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """6-bit multiples of two float16 numbers shared by eight groups."""
    d, least = _read_float16(blocks[..., :2], 1), _read_float16(blocks[..., 2:4], 1)
    first, second, last = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    steps = torch.cat((first & 63, last & 15 | first >> 2 & 48), -1)
    down = torch.cat((second & 63, last >> 4 | second >> 2 & 48), -1)
    return (d * steps).flatten(1), -(least * down).flatten(1)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """[out, in] to [out, in / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _to_signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero
