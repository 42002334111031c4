"""Formats of compressed-tensors (https://github.com/vllm-project/compressed-tensors)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.engine.layers.schemes.online_quantization import quantize_float8, quantize_int8
from quire.kernels.backend import Backend
from quire.kernels.int4_fit import GROUP_SIZE

TensorLayout = dict[str, tuple[str, tuple[int, ...]]]
"""The safetensors dtype and shape of each tensor, by its name."""


class QuantizedFormat(ABC):
    format_name: str
    weights_config: dict[str, Any]
    activations_config: dict[str, Any] | None = None
    """For other programs; Quire does not read it."""

    @abstractmethod
    def tensor_layout(self, outs: int, inner: int) -> TensorLayout | None:
        """Returns None if the format cannot store a linear of this shape."""

    @abstractmethod
    def quantize_weight(self, weight: Tensor) -> dict[str, Tensor]:
        """`weight` is [out, in]."""

    def quantization_config(self, unquantized: Sequence[str]) -> dict[str, Any]:
        """`unquantized`: names of linears, or regular expressions for them ("re:...")."""
        group = {"targets": ["Linear"], "weights": self.weights_config, "input_activations": self.activations_config}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format_name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": list(unquantized),
            "kv_cache_scheme": None,
        }


class ChannelFormat(QuantizedFormat):
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.format_name = f"{kind}-quantized"
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        self.weights_config = common | {"strategy": "channel", "dynamic": False}
        self.activations_config = common | {"strategy": "token", "dynamic": True}

    def tensor_layout(self, outs: int, inner: int) -> TensorLayout | None:
        codes = "I8" if self._kind == "int" else "F8_E4M3"
        return {"weight": (codes, (outs, inner)), "weight_scale": ("BF16", (outs, 1))}

    def quantize_weight(self, weight: Tensor) -> dict[str, Tensor]:
        quantized = quantize_int8(weight) if self._kind == "int" else quantize_float8(weight)
        return {"weight": quantized.codes, "weight_scale": quantized.scales.bfloat16()}


class Int4GroupFormat(QuantizedFormat):
    """4-bit weights with a scale and a zero point for each 32 inputs. The floating-point offsets of --quantization int4
    would fit better, but compressed-tensors has none.
    """

    format_name = "pack-quantized"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.weights_config = {
            "num_bits": 4,
            "type": "int",
            "symmetric": False,
            "strategy": "group",
            "group_size": GROUP_SIZE,
        }
        self.weights_config["dynamic"] = False

    def tensor_layout(self, outs: int, inner: int) -> TensorLayout | None:
        if inner % GROUP_SIZE:
            return None
        groups = inner // GROUP_SIZE
        return {
            "weight_packed": ("I32", (outs, inner // 8)),
            "weight_scale": ("BF16", (outs, groups)),
            "weight_zero_point": ("I32", (-(-outs // 8), groups)),
            "weight_shape": ("I64", (2,)),
        }

    def quantize_weight(self, weight: Tensor) -> dict[str, Tensor]:
        outs, inner = weight.shape
        codes, scales, zeros = self._backend.fit_int4(weight.reshape(-1, GROUP_SIZE), zero_points=True)
        rows = torch.nn.functional.pad(zeros.view(outs, -1).T.to(torch.uint8), (0, -outs % 8))  # [groups, outs]
        return {
            "weight_packed": codes.view(outs, -1).view(torch.int32),  # codes packed as little-endian
            "weight_scale": scales.view(outs, -1).bfloat16(),
            "weight_zero_point": (rows[:, ::2] | rows[:, 1::2] << 4).contiguous().view(torch.int32).T.contiguous(),
            "weight_shape": torch.tensor([outs, inner]),
        }


def make_quantized_format(name: str, backend: Backend) -> QuantizedFormat:
    return Int4GroupFormat(backend) if name == "int4" else ChannelFormat("int" if name == "int8" else "float")
