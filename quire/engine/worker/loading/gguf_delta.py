"""The tensors of a GGUF file's gated delta nets as a checkpoint has them: its value heads in the order of their key
heads, and the logarithm of what decays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.gguf.delta_nets import TILED
from quire.engine.layers.recurrent.delta_net import DeltaNetSpec
from quire.engine.models import decoder_spec

_LINEAR = ".linear_attn."
_OF_VALUES = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
"""Whose rows are those of the value heads, and no others."""


def logarithms(name: str, rows: Tensor) -> Tensor:
    """Of rates that files have as negative numbers. Raises ModelError."""
    if not bool((rows < 0).all()):
        raise ModelError(f"model: {name}: expected numbers below 0")
    return (-rows.float()).log()


class DeltaNets:
    """Of one model; where it has none, nothing changes."""

    def __init__(self, config: ModelConfig) -> None:
        self._tiled = config.model_type in TILED
        nets = decoder_spec(config).parts(DeltaNetSpec) if self._tiled or config.model_type == "qwen3_next" else []
        self._net = nets[0] if nets else None

    def arranged(self, name: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor by its name in a checkpoint, or its parts; in few bits a row of it is one of bytes. Raises
        ModelError."""
        if self._net is None or _LINEAR not in name:
            yield name, rows
            return
        net, own = self._net, name.partition(_LINEAR)[2]
        if own == "in_proj_ba.weight":  # of each key head side by side
            grouped = self._of_heads(name, rows, (net.key_heads, 2, net.heads // net.key_heads))
            for letter, part in zip("ba", grouped.unbind(1), strict=True):
                yield name.replace("in_proj_ba", f"in_proj_{letter}"), part.flatten(0, 1)
            return
        if own == "A_log":
            rows = logarithms(name, rows)
        if self._tiled and own in _OF_VALUES:
            rows = self._in_turn(name, rows)
        elif self._tiled and own in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * net.key_heads * net.key
            rows = torch.cat((rows[:keys], self._in_turn(name, rows[keys:])))
        elif self._tiled and own == "out_proj.weight" and rows.is_floating_point():
            rows = self._in_turn(name, rows.t()).t()
        yield name, rows.unsqueeze(1) if own == "conv1d.weight" else rows

    def order(self, linear: str) -> Tensor | None:
        """Of a linear in few bits, the inputs that its groups are of, [in]; None: they are as they stand."""
        net = self._net
        if net is None or not self._tiled or not linear.endswith(f"{_LINEAR}out_proj") or net.heads == net.key_heads:
            return None
        every = torch.arange(net.heads * net.value)
        return every.view(net.key_heads, -1, net.value).transpose(0, 1).flatten()

    def _in_turn(self, name: str, rows: Tensor) -> Tensor:
        """The rows of value heads, those of a key head side by side."""
        assert self._net is not None
        keys, each = self._net.key_heads, self._net.heads // self._net.key_heads
        tiles = self._of_heads(name, rows, (each, keys, -1))
        return tiles.transpose(0, 1).flatten(0, 2)

    def _of_heads(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert self._net is not None
        if not rows.ndim or not rows.shape[0] or rows.shape[0] % self._net.heads:
            raise ModelError(f"model: {name} has the shape {list(rows.shape)}, which is not of {self._net.heads} heads")
        return rows.unflatten(0, shape)
