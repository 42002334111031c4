"""Converts integers of 2 to 8 bits to grouped weights: GPTQ, AWQ, compressed-tensors.

In all of them, a weight is scale * (code - zero). Grouped weights store scale and offset. No precision is lost, because
float32 represents the product of an 11-bit scale and an 8-bit code exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.checkpoint.quantization import WeightFormat
from quire.engine.common.errors import ModelError
from quire.engine.layers.schemes import TensorSpec
from quire.engine.layers.schemes.mixed import LinearFormat
from quire.kernels.quantized_tensors import GroupedWeight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibbles of a word in which eight consecutive outputs are stored."""


@dataclass(frozen=True, slots=True)
class GPTQFormat(LinearFormat):
    """32-bit words pack codes along inputs, and zero points along outputs."""

    weight_format: WeightFormat
    has_group_index: bool

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        bits, groups = self.weight_format.bits, _num_groups(in_features, self.weight_format.group_size)
        specs = {
            "qweight": TensorSpec((in_features * bits // 32, out_features), torch.int32),
            "qzeros": TensorSpec((groups, out_features * bits // 32), torch.int32),
            "scales": TensorSpec((groups, out_features), torch.float32),
        }
        return specs | ({"g_idx": TensorSpec((in_features,), torch.int32)} if self.has_group_index else {})

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        bits = self.weight_format.bits
        codes = unpack_bits(tensors["qweight"].T, bits)
        zeros = unpack_bits(tensors["qzeros"], bits).T
        if self.weight_format.zero_point_offset:
            zeros = zeros + 1 & 2**bits - 1
        order = act_order_permutation(
            tensors.get("g_idx"), self.weight_format.group_size or codes.shape[1], f"{linear}.g_idx"
        )
        return make_grouped_weight(codes, tensors["scales"].T, zeros, bits, self.weight_format.group_size, order)


@dataclass(frozen=True, slots=True)
class AWQFormat(LinearFormat):
    """32-bit words pack codes and zero points along outputs."""

    weight_format: WeightFormat

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        groups = _num_groups(in_features, self.weight_format.group_size)
        return {
            "qweight": TensorSpec((in_features, out_features // 8), torch.int32),
            "qzeros": TensorSpec((groups, out_features // 8), torch.int32),
            "scales": TensorSpec((groups, out_features), torch.float32),
        }

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        codes, zeros = (
            unpack_bits(tensors[name], 4).unflatten(1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(1).T
            for name in ("qweight", "qzeros")
        )
        return make_grouped_weight(codes, tensors["scales"].T, zeros, 4, self.weight_format.group_size, None)


@dataclass(frozen=True, slots=True)
class PackQuantizedFormat(LinearFormat):
    """pack-quantized. Words along inputs contain codes + 2 ** (bits - 1). Words along outputs contain zero points with
    the same offset.
    """

    weight_format: WeightFormat
    scale_spec: TensorSpec
    shape_dtype: torch.dtype
    has_group_index: bool

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        bits, groups = self.weight_format.bits, _num_groups(in_features, self.weight_format.group_size)
        specs = {
            "weight_packed": TensorSpec((out_features, -(-in_features * bits // 32)), torch.int32),
            "weight_scale": self.scale_spec,
            "weight_shape": TensorSpec((2,), self.shape_dtype),
        }
        if not self.weight_format.is_symmetric:
            specs["weight_zero_point"] = TensorSpec((-(-out_features * bits // 32), groups), torch.int32)
        return specs | ({"weight_g_idx": TensorSpec((in_features,), torch.int32)} if self.has_group_index else {})

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        outs, inner = tensors["weight_shape"].tolist()
        packed, bits = tensors["weight_packed"], self.weight_format.bits
        if outs != packed.shape[0] or -(-inner * bits // 32) != packed.shape[1]:
            shape = f"{[outs, inner]} is not the shape of {list(packed.shape)} words of {bits} bits"
            raise ModelError(f"model: {linear}.weight_shape: {shape}")
        codes, zeros = unpack_bits(packed, bits)[:, :inner], tensors.get("weight_zero_point")
        scales = broadcast_to_groups(
            tensors["weight_scale"], codes.shape, self.weight_format.group_size, f"{linear}.weight_scale"
        )
        if zeros is not None:
            zeros = unpack_bits(zeros.T, bits)[:, :outs].T
        order = act_order_permutation(
            tensors.get("weight_g_idx"), self.weight_format.group_size or inner, f"{linear}.weight_g_idx"
        )
        return make_grouped_weight(codes, scales, zeros, bits, self.weight_format.group_size, order)


@dataclass(frozen=True, slots=True)
class Int8Format(LinearFormat):
    """int8 with scales per tensor, output or group, and optional zero points."""

    weight_format: WeightFormat
    scale_spec: TensorSpec
    zero_point_spec: TensorSpec | None

    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        specs = {"weight": TensorSpec((out_features, in_features), torch.int8), "weight_scale": self.scale_spec}
        return specs if self.zero_point_spec is None else specs | {"weight_zero_point": self.zero_point_spec}

    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        codes = tensors["weight"]
        scales = broadcast_to_groups(
            tensors["weight_scale"], codes.shape, self.weight_format.group_size, f"{linear}.weight_scale"
        )
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            where = f"{linear}.weight_zero_point"
            zeros = broadcast_to_groups(zeros, codes.shape, self.weight_format.group_size, where).to(torch.int16) + 128
        return make_grouped_weight(codes.to(torch.int16) + 128, scales, zeros, 8, self.weight_format.group_size, None)


def make_grouped_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int, order: Tensor | None
) -> GroupedWeight:
    """Makes the weight scales * (codes - zeros). `codes` [out, in] are 0 to 2 ** bits - 1. `scales` and `zeros` are
    [out, groups]. If `zeros` is None, 2 ** (bits - 1) is used. Groups shrink if they do not divide the inputs.
    """
    inner = codes.shape[1]
    middle, scales = 2 ** (bits - 1), scales.float()
    offsets = None
    if zeros is not None and bool((zeros != middle).any()):
        offsets = scales * (middle - zeros.to(torch.int16))
    step = math.gcd(group or inner, inner)
    if step != (group or inner):
        group_of_step = torch.arange(0, inner, step, device=scales.device) // group
        scales = scales[:, group_of_step]
        offsets = None if offsets is None else offsets[:, group_of_step]
    if order is not None:
        codes = codes[:, order]
    if bits > 4 or inner % 2:
        packed = (codes.to(torch.int16) - middle).to(torch.int8).contiguous()
    else:
        low = (codes + (8 - middle)).to(torch.uint8)
        packed = low[:, ::2] | low[:, 1::2] << 4
    scales = scales.contiguous()
    return GroupedWeight(packed, scales, None if offsets is None else offsets.contiguous(), None, order)


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Maps [rows, n] 32-bit words to [rows, codes] uint8. A code may cross words."""
    rows = words.contiguous().view(torch.uint8).view(words.shape[0], -1)  # little-endian
    if bits == 8:
        return rows
    if bits in (2, 4):
        return (
            rows.unsqueeze(2) >> torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device) & 2**bits - 1
        ).flatten(1)
    starts = torch.arange(rows.shape[1] * 8 // bits, device=rows.device) * bits
    byte, shift = starts // 8, (starts % 8).to(torch.int32)
    padded = torch.nn.functional.pad(rows, (0, 1)).to(torch.int32)
    return ((padded[:, byte] | padded[:, byte + 1] << 8) >> shift & 2**bits - 1).to(torch.uint8)


def act_order_permutation(group_of: Tensor | None, group: int, where: str) -> Tensor | None:
    """Returns the order of inputs by group; None if they are in order already. Raises ModelError for groups of unequal
    size.
    """
    if group_of is None:
        return None
    order = torch.argsort(group_of, stable=True)
    inputs = torch.arange(len(order), device=order.device)
    if not torch.equal(group_of[order].long(), inputs // group):
        raise ModelError(f"model: {where}: its groups are not of {group} inputs each")
    return None if torch.equal(order, inputs) else order


def broadcast_to_groups(numbers: Tensor, shape: torch.Size, group: int, where: str) -> Tensor:
    """Return [out, groups]."""
    outs, groups = shape[0], _num_groups(shape[1], group)
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(outs, groups)
    if numbers.numel() not in (outs, outs * groups) or numbers.shape[0] != outs:
        raise ModelError(f"model: {where} has shape {list(numbers.shape)}, for {outs} outputs of {groups} groups")
    return numbers.reshape(outs, -1).expand(outs, groups)


def _num_groups(inner: int, group: int) -> int:
    return -(-inner // group) if group else 1
