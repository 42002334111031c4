"""Qwen's towers over an image of any shape: Qwen2-VL (Wang et al., 2024), Qwen2.5-VL (Bai et al., 2025) and Qwen3-VL
(Qwen Team, 2025). Patches are rotated by row and column; merge x merge of them side by side become a token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from quire.engine.encoders.encoder import EncoderNames
from quire.engine.encoders.pieces import ROWS
from quire.engine.encoders.vision.tower import (
    Patches,
    Reading,
    Tower,
    TowerMaking,
    apart,
    axial_turns,
    encoder_spec,
    frequencies,
    normalised,
)
from quire.engine.images.patches import Patched
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of
from quire.engine.types import Image
from quire.kernels.activation import GELU
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.transfer import upload

_PLAIN = ("mlp.fc1",), "mlp.fc2"
_GATED = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
_OF_QWEN3 = ("mlp.linear_fc1",), "mlp.linear_fc2"


class GridTower(Tower):
    def __init__(self, vision: Patched, making: TowerMaking) -> None:
        shape = vision.shape
        self._vision, self._making = vision, making
        up, down = _GATED if vision.modern else _OF_QWEN3 if vision.table else _PLAIN
        layers = ("attn.qkv",), "attn.proj", "norm1", up, down, "norm2"
        spec = encoder_spec(shape, EncoderNames("", "visual.blocks.{}", *layers))
        if vision.modern:
            spec = replace(spec, root_mean_square=True, norm_bias=False, gated=True)
        if vision.window:
            windowed = (index not in vision.full_layers for index in range(shape.num_layers))
            spec = replace(spec, groups=tuple(map(int, windowed)))
        self._encoder = making.encoder(spec)
        patches, biased = "visual.patch_embed.proj", bool(vision.table)
        self._patches = Patches(making, shape, patches, bias=biased, frames=vision.frames)
        self._merger = Merger(vision, making, "visual.merger", shared_norm=True)
        names = [f"visual.deepstack_merger_list.{index}" for index in range(len(vision.tapped))]
        self._deep = [Merger(vision, making, name, shared_norm=False) for name in names]
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        vision, table = self._vision, parameters_of(self._encoder, self._patches, self._merger, *self._deep)
        if vision.table:
            size = (vision.table, vision.shape.hidden_size)
            table["visual.pos_embed.weight"] = held(self._weights, "positions", size, self._making.dtype)
        return table

    def reading(self, images: Sequence[Image]) -> Reading:
        vision, shape, count, device = self._vision, self._vision.shape, len(images), self._making.device
        rows, columns = images[0].height // shape.patch_size, images[0].width // shape.patch_size
        ordered, lengths = self._ordered(rows, columns, count)
        order, tokens = upload([ordered, self._tokens(ordered, columns)], device)
        x = torch.cat([self._patches(normalised(each, vision.colours, device))[order] for each in images])
        if vision.table:
            x = x + self._interpolated(rows, columns)[order].repeat(count, 1)
        alike = frequencies(shape.hidden_size // shape.num_heads // 2, 10000.0, device)
        turns = axial_turns(order // columns, order % columns, alike, alike).repeat(count, 1)
        hidden, tapped = yield from self._encoder.pieces(x, lengths, turns, vision.tapped)
        merged = []
        for merge, each in zip((self._merger, *self._deep), (hidden, *tapped), strict=True):
            merged.append((yield from self._merged(merge, each)))
        return [each[tokens] for each in torch.cat(merged, dim=1).chunk(count)]

    def _merged(self, merge: Merger, hidden: Tensor) -> Generator[float, None, Tensor]:
        """Patches as tokens; a merger weighs half a layer."""
        parts, unit = [], self._vision.merge**2
        for part in hidden.split(ROWS // unit * unit):
            parts.append(merge(part))
            yield len(part) / 2 / self._vision.shape.num_layers
        return torch.cat(parts)

    def _ordered(self, rows: int, columns: int, images: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The patches of an image in the order of the encoder [T] int64, those of a token side by side, those of a
        window too; and the lengths of who sees each other of so many images', in the second group within a window
        alone."""
        merge = self._vision.merge
        places = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge).swapaxes(1, 2)
        lengths = apart(rows * columns, images)
        if not self._vision.window:
            return places.flatten(), lengths
        window = self._vision.window // self._vision.unit
        bands = (places[top : top + window] for top in range(0, rows // merge, window))
        squares = [band[:, at : at + window].flatten() for band in bands for at in range(0, columns // merge, window)]
        return np.concatenate(squares), [*lengths, np.array([len(each) for each in squares] * images)]

    def _tokens(self, order: np.ndarray, columns: int) -> np.ndarray:
        """[tokens] int64: where in the encoder's order each token is, by rows."""
        merge = self._vision.merge
        first = order[:: merge**2]
        found: np.ndarray = np.argsort(first // columns // merge * (columns // merge) + first % columns // merge)
        return found

    def _interpolated(self, rows: int, columns: int) -> Tensor:
        """Positions of the patches by rows, [rows * columns, hidden]: those of the table's square, linearly between its
        own, corners on corners. In float32."""
        side = isqrt(self._vision.table)
        down, right = (torch.linspace(0, side - 1, count, device=self._making.device) for count in (rows, columns))
        parts = []
        for at, high in ((down, 0), (down, 1)):
            for along, wide in ((right, 0), (right, 1)):
                row, column = ((each.int() + step).clamp(max=side - 1) for each, step in ((at, high), (along, wide)))
                share_row, share_column = at - at.int(), along - along.int()
                by_row = share_row if high else 1 - share_row
                weight = by_row[:, None] * (share_column if wide else 1 - share_column)
                index = (row[:, None] * side + column).flatten()
                parts.append(self._weights["positions"][index] * weight.flatten()[:, None])
        return sum(parts[1:], parts[0]).to(self._making.dtype)


class Merger:
    """merge x merge patches side by side through two linears with GELU between, behind a norm: of each patch, whose
    weights all share, or of all of them as one."""

    def __init__(self, vision: Patched, making: TowerMaking, name: str, *, shared_norm: bool) -> None:
        hidden = vision.shape.hidden_size
        self._size = size = hidden * vision.merge**2
        self._making, self._modern, self._shared = making, vision.modern, shared_norm
        norm, first, last = ("norm", "linear_fc1", "linear_fc2") if vision.table else ("ln_q", "mlp.0", "mlp.2")
        width = hidden if shared_norm else size
        self._norm = LayerNormWeights(f"{name}.{norm}", width, bias=not vision.modern)
        self._first = making.linear(size, f"{name}.{first}", size)
        self._last: JoinedLinear = making.linear(size, f"{name}.{last}", making.text_size)

    def parameters(self) -> ParameterTable:
        return parameters_of(self._norm, self._first, self._last)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[patches, hidden] to [tokens, text_size]."""
        backend, norm = self._making.backend, self._norm
        x = hidden if self._shared else hidden.view(-1, self._size)
        if self._modern:
            x = backend.rms_norm(x, norm.weight, 1e-6)
        else:
            x = backend.layer_norm(x, norm.weight, norm.bias, 1e-6)
        wide = self._first.packed(x.view(-1, self._size), NO_ADAPTERS)
        return self._last.packed(backend.activate(wide, GELU), NO_ADAPTERS)
