"""8-bit and 4-bit floats, and bitsandbytes' 8 and 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from quire.engine.checkpoint.quantization import WeightFormat
from quire.engine.errors import ModelError
from quire.engine.layers.schemes import Stored
from quire.engine.layers.schemes.integers import per_group
from quire.engine.layers.schemes.mixed import Format
from quire.kernels.quantized import Float8Weight, GroupedWeight

_STATE = "weight.quant_state.bitsandbytes__"
_ABSMAX, _MAP = "weight.absmax", "weight.quant_map"
_NESTED_ABSMAX, _NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"


FLOATS_OF_4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""4-bit floats (e2m1), doubled, by their codes."""
_Side = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


class _State(msgspec.Struct):
    """What bitsandbytes writes of a 4-bit tensor."""

    blocksize: _Side
    shape: tuple[_Side, _Side]
    nested_blocksize: _Side = 1
    nested_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """e4m3 numbers with a scale for the tensor, each output or each block."""

    stored: WeightFormat
    scale: Stored

    def tensors(self, in_features: int, out_features: int) -> dict[str, Stored]:
        codes = Stored((out_features, in_features), torch.float8_e4m3fn)
        return {"weight": codes, self.stored.scale_name: self.scale}

    def form(self, tensors: dict[str, Tensor], linear: str) -> Float8Weight:
        codes, scales = tensors["weight"], tensors[self.stored.scale_name].float()
        outs, inner = codes.shape
        where, strategy = f"{linear}.{self.stored.scale_name}", self.stored.strategy
        if strategy == "block":
            block = self.stored.block
            if tuple(scales.shape) != (-(-outs // block[0]), -(-inner // block[1])):
                raise ModelError(f"model: {where} has shape {list(scales.shape)}, for blocks of {list(block)}")
        elif strategy == "group":
            if inner % self.stored.group:
                raise ModelError(f"model: {where}: {inner} inputs are not groups of {self.stored.group}")
            block = (1, self.stored.group)
            scales = per_group(scales, codes.shape, self.stored.group, where).contiguous()
        elif scales.numel() == 1:
            block, scales = (outs, inner), scales.reshape(1, 1)
        else:
            block, scales = (1, inner), per_group(scales, codes.shape, 0, where).contiguous()
        return Float8Weight(codes, scales, block)


@dataclass(frozen=True, slots=True)
class Float4(Format):
    """e2m1 numbers, the first in the low half of a byte. MXFP4 has a power of two for each 32 inputs, NVFP4 an e4m3
    number for each 16 and one number that all are divided by."""

    stored: WeightFormat

    def tensors(self, in_features: int, out_features: int) -> dict[str, Stored]:
        shared = self.stored.strategy == "tensor_group"
        scales = torch.float8_e4m3fn if shared else torch.uint8
        found = {
            "weight_packed": Stored((out_features, in_features // 2), torch.uint8),
            "weight_scale": Stored((out_features, -(-in_features // self.stored.group)), scales),
        }
        return found | ({"weight_global_scale": Stored((1,), torch.float32)} if shared else {})

    def form(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        codes, scales, divisor = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_global_scale")
        if codes.shape[1] * 2 != scales.shape[1] * self.stored.group:
            raise ModelError(f"model: {linear}: {codes.shape[1] * 2} inputs are not groups of {self.stored.group}")
        scales = half_powers(scales) if divisor is None else scales.float() / divisor / 2
        return GroupedWeight(codes, scales, None, FLOATS_OF_4)


def half_powers(exponents: Tensor) -> Tensor:
    """2 ** (exponent - 128) as float32, for bytes: the halves of e8m0 scales, because FLOATS_OF_4 are doubled."""
    exponents = exponents.int()
    # The two smallest are not normal numbers.
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Bnb8(Format):
    """LLM.int8(): int8 numbers, and of each output the largest weight, which 127 stands for."""

    def tensors(self, in_features: int, out_features: int) -> dict[str, Stored]:
        codes = Stored((out_features, in_features), torch.int8)
        return {"weight": codes, "SCB": Stored((out_features,), torch.float32)}

    def form(self, tensors: dict[str, Tensor], linear: str) -> GroupedWeight:
        return GroupedWeight(tensors["weight"], (tensors["SCB"] / 127).unsqueeze(1))


@dataclass(frozen=True, slots=True)
class Bnb4(Format):
    """NF4 or FP4: half bytes, the first in the high half, that stand for 16 floats times the largest of a block of the
    flattened weights. The largest ones may be 8-bit codes themselves. No form has 16 floats: they become numbers."""

    state: str
    """The name of the tensor that holds a JSON object on all this, after the prefix: nf4 or fp4."""
    shapes: dict[str, Stored]
    """The tensors beside the weights, as they are stored."""

    def tensors(self, in_features: int, out_features: int) -> dict[str, Stored]:
        return {"weight": Stored((in_features * out_features // 2, 1), torch.uint8)} | self.shapes

    def form(self, tensors: dict[str, Tensor], linear: str) -> Tensor:
        state = self._state(tensors[f"{_STATE}{self.state}"], linear)
        absmax = tensors[_ABSMAX]
        if absmax.dtype == torch.uint8:
            nested = tensors[_NESTED_MAP][absmax.long()]
            largest = tensors[_NESTED_ABSMAX].repeat_interleave(state.nested_blocksize)[: len(nested)]
            absmax = nested * largest + state.nested_offset
        codes = tensors["weight"].flatten()
        halves = torch.stack((codes >> 4, codes & 15), dim=-1).flatten()
        numbers = tensors[_MAP][halves.int()]
        scales = absmax.float().repeat_interleave(state.blocksize)[: len(numbers)]
        if len(scales) != len(numbers) or state.shape[0] * state.shape[1] != len(numbers):
            raise ModelError(f"model: {linear}.{_ABSMAX} has {len(absmax)} numbers for {len(numbers)} weights")
        return (numbers * scales).view(*state.shape)

    def _state(self, stored: Tensor, linear: str) -> _State:
        try:
            return msgspec.json.decode(bytes(stored.tolist()), type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ModelError(f"model: {linear}.{_STATE}{self.state}: cannot be read") from None


def bnb4(headers: dict[str, Stored], linear: str) -> Bnb4:
    """The format of a linear by the tensors beside its weights, by their names. Raises ModelError where it has none."""
    state = next((name.removeprefix(_STATE) for name in headers if name.startswith(_STATE)), None)
    if state is None:
        raise ModelError(f"model: the weights lack {linear}.{_STATE}nf4")
    beside = {name: each for name, each in headers.items() if name not in ("weight", "bias")}
    needed = [_ABSMAX, _MAP]
    if beside.get(_ABSMAX, Stored((), torch.float32)).dtype == torch.uint8:
        needed += [_NESTED_ABSMAX, _NESTED_MAP]
    if missing := [name for name in needed if name not in beside]:
        raise ModelError(f"model: the weights lack {linear}.{missing[0]}")
    return Bnb4(state, beside)
