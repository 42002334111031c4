"""SigLIP 2's tower (Tschannen et al., 2025) over an image of any shape, as LFM2-VL has it: learned positions of a
square, resized to the image's patches; merge x merge patches side by side become a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.vision.connectors import ShuffledLinears
from quire.engine.encoders.vision.squares import siglip
from quire.engine.encoders.vision.tower import ColourPatches, Reading, Tower, TowerMaking, apart, normalised
from quire.engine.images.lfm2 import Lfm2
from quire.engine.layers.parameters import ParameterTable, held, parameters_of
from quire.engine.types import Image

_TOWER = "vision_tower"


class Lfm2Tower(Tower):
    unused = (f"{_TOWER}.head.",)

    def __init__(self, vision: Lfm2, making: TowerMaking) -> None:
        shape = vision.shape
        self._vision, self._making = vision, making
        spec = siglip(shape, _TOWER)
        self._encoder = making.encoder(spec.encoder)
        self._patches, self._table = ColourPatches(making, shape, spec.patches, bias=True), spec.positions
        self._connector = ShuffledLinears(
            making,
            shape.hidden_size,
            vision.merge,
            vision.act,
            "multi_modal_projector",
            inner=vision.inner,
            bias=vision.bias,
            norm=vision.norm,
        )
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        shape = (self._vision.table**2, self._vision.shape.hidden_size)
        table = {self._table: held(self._weights, "positions", shape, self._making.dtype)}
        return parameters_of(self._encoder, self._patches, self._connector) | table

    def reading(self, images: Sequence[Image]) -> Reading:
        size = self._vision.shape.patch_size
        rows, columns = images[0].height // size, images[0].width // size
        places = self._placed(rows, columns)
        pixels = (normalised(each, self._vision.colours, self._making.device) for each in images)
        x = torch.cat([self._patches(each) + places for each in pixels])
        hidden, _ = yield from self._encoder.pieces(x, apart(rows * columns, len(images)))
        return [self._connector.of(each, rows, columns) for each in hidden.chunk(len(images))]

    def _placed(self, rows: int, columns: int) -> Tensor:
        """Positions of patches by rows, [rows * columns, hidden]. Interpolated in float32."""
        side = self._vision.table
        square = self._weights["positions"].view(1, side, side, -1).permute(0, 3, 1, 2).float()
        found = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return found[0].flatten(1).T.to(self._making.dtype)
