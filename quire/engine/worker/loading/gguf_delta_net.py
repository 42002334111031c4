"""Converts GGUF's gated delta nets to checkpoint form, with value heads ordered by key head and decay rates as logs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.architecture.recurrent import DeltaNetSpec
from quire.engine.common.errors import ModelError
from quire.engine.families import find_decoder_family
from quire.engine.families.base.gguf.gguf_format import GGUFFormat
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models import decoder_spec

_LINEAR = ".linear_attn."
_VALUE_HEAD_TENSORS = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


def log_decay_rates(name: str, rows: Tensor) -> Tensor:
    """GGUF files store the negated rates. Raises ModelError."""
    if not bool((rows < 0).all()):
        raise ModelError(f"model: {name}: expected numbers below 0")
    return (-rows.float()).log()


def gguf_format(config: ModelConfig) -> GGUFFormat:
    family = find_decoder_family(config.model_type)
    gguf = None if family is None else family.gguf
    assert gguf is not None, f"{config.model_type} has no GGUF files"
    return gguf


class GGUFDeltaNetConverter:
    """Changes nothing if the model has no delta net."""

    def __init__(self, config: ModelConfig) -> None:
        self._is_tiled = gguf_format(config).tiles_value_heads
        nets = decoder_spec(config).sublayers_of_kind(DeltaNetSpec)
        self._net = nets[0] if nets else None

    def convert_to_named_tensors(self, name: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Rows of quantized tensors are bytes. Raises ModelError."""
        if self._net is None or _LINEAR not in name:
            yield name, rows
            return
        net, tensor_name = self._net, name.partition(_LINEAR)[2]
        if tensor_name == "in_proj_ba.weight":  # interleaved by key head
            grouped = self._unflatten_heads(name, rows, (net.num_key_heads, 2, net.num_heads // net.num_key_heads))
            for letter, part in zip("ba", grouped.unbind(1), strict=True):
                yield name.replace("in_proj_ba", f"in_proj_{letter}"), part.flatten(0, 1)
            return
        if tensor_name == "A_log":
            rows = log_decay_rates(name, rows)
        if self._is_tiled and tensor_name in _VALUE_HEAD_TENSORS:
            rows = self._group_by_key_head(name, rows)
        elif self._is_tiled and tensor_name in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * net.num_key_heads * net.key_dim
            rows = torch.cat((rows[:keys], self._group_by_key_head(name, rows[keys:])))
        elif self._is_tiled and tensor_name == "out_proj.weight" and rows.is_floating_point():
            rows = self._group_by_key_head(name, rows.t()).t()
        yield name, rows.unsqueeze(1) if tensor_name == "conv1d.weight" else rows

    def input_order(self, linear: str) -> Tensor | None:
        """Returns the order in which GGUF stores the linear's inputs, [in], or None if it is the checkpoint's order."""
        net = self._net
        if (
            net is None
            or not self._is_tiled
            or not linear.endswith(f"{_LINEAR}out_proj")
            or net.num_heads == net.num_key_heads
        ):
            return None
        every = torch.arange(net.num_heads * net.value_dim)
        return every.view(net.num_key_heads, -1, net.value_dim).transpose(0, 1).flatten()

    def _group_by_key_head(self, name: str, rows: Tensor) -> Tensor:
        assert self._net is not None
        keys, each = self._net.num_key_heads, self._net.num_heads // self._net.num_key_heads
        tiles = self._unflatten_heads(name, rows, (each, keys, -1))
        return tiles.transpose(0, 1).flatten(0, 2)

    def _unflatten_heads(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self._net is not None
        if not rows.ndim or not rows.shape[0] or rows.shape[0] % self._net.num_heads:
            raise ModelError(
                f"model: {name} has the shape {list(rows.shape)}, which is not of {self._net.num_heads} heads"
            )
        return rows.unflatten(0, shape)
