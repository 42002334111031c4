"""Pixtral's tower (Agrawal et al., 2024) over an image of any shape, and what merges patches in Mistral Small 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.encoders.encoder import EncoderNames
from quire.engine.encoders.vision.connectors import TwoLinears
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
from quire.engine.images.pixtral import Pixtral
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.types import Image
from quire.kernels.backend import NO_ADAPTERS

_TOWER, _CONNECTOR = "vision_tower", "multi_modal_projector"
_NAMES = EncoderNames(
    words="",
    layer=f"{_TOWER}.transformer.layers.{{}}",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    attention_norm="attention_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="ffn_norm",
)


class PixtralTower(Tower):
    def __init__(self, vision: Pixtral, making: TowerMaking) -> None:
        shape = vision.shape
        self._vision, self._making = vision, making
        plain = {"root_mean_square": True, "bias": False, "norm_bias": False, "gated": True}
        spec = replace(encoder_spec(replace(shape, eps=1e-5), _NAMES), **plain)  # type: ignore[arg-type]
        self._encoder = making.encoder(spec)
        self._patches = Patches(making, shape, f"{_TOWER}.patch_conv", bias=False)
        self._first_norm = LayerNormWeights(f"{_TOWER}.ln_pre", shape.hidden_size, bias=False)
        hidden, merged = shape.hidden_size, shape.hidden_size * vision.merge**2
        self._norm = LayerNormWeights(f"{_CONNECTOR}.norm", hidden, bias=False)
        self._merger = making.linear(merged, f"{_CONNECTOR}.patch_merger.merging_layer", hidden, bias=False)
        self._connector = TwoLinears(making, hidden, vision.act, _CONNECTOR, bias=vision.bias)

    def parameters(self) -> ParameterTable:
        merging = (self._norm, self._merger) if self._vision.merges else ()
        return parameters_of(self._encoder, self._patches, self._first_norm, self._connector, *merging)

    def reading(self, images: Sequence[Image]) -> Reading:
        vision, shape, backend, device = self._vision, self._vision.shape, self._making.backend, self._making.device
        rows, columns = images[0].height // shape.patch_size, images[0].width // shape.patch_size
        x = torch.cat([self._patches(normalised(each, vision.colours, device)) for each in images])
        x = backend.rms_norm(x, self._first_norm.weight, 1e-5)
        places = torch.arange(rows * columns, device=device)
        each = frequencies(shape.hidden_size // shape.num_heads, vision.theta, device)
        turns = axial_turns(places // columns, places % columns, each[0::2], each[1::2]).repeat(len(images), 1)
        hidden, _ = yield from self._encoder.pieces(x, apart(rows * columns, len(images)), turns)
        merged = (self._merged(one, rows, columns) if vision.merges else one for one in hidden.chunk(len(images)))
        return [self._connector(one) for one in merged]

    def _merged(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        """merge x merge patches side by side, channel by channel, as one."""
        merge = self._vision.merge
        x = self._making.backend.rms_norm(hidden, self._norm.weight, self._vision.norm_eps)
        squares = x.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        return self._merger.packed(squares.reshape(rows * columns // merge**2, -1).contiguous(), NO_ADAPTERS)
