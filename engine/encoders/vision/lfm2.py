"""SigLIP 2's tower (Tschannen et al., 2025) over an image of any shape, as LFM2-VL has it: learned positions of a
square, resized to the image's patches; merge x merge patches side by side become a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.encoder import Encoder
from quire.engine.encoders.vision.connectors import ShuffledLinears
from quire.engine.encoders.vision.squares import siglip
from quire.engine.encoders.vision.tower import CPU, Reading, Tower, TowerMaking, apart, normalised
from quire.engine.images.lfm2 import Lfm2
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.types import Image
from quire.kernels.backend import NO_ADAPTERS

_TOWER = "vision_tower"


class Lfm2Tower(Tower):
    unused = (f"{_TOWER}.head.",)

    def __init__(self, vision: Lfm2, making: TowerMaking) -> None:
        shape = vision.shape
        self._vision, self._making = vision, making
        spec = siglip(shape, _TOWER)
        self._encoder = Encoder(
            spec.encoder,
            making.backend,
            making.scheme,
            dtype=making.dtype,
            device=CPU,
            max_model_len=1,
            progress=making.progress,
        )
        self._patches, self._table = (
            making.linear(3 * shape.patch_size**2, spec.patches, shape.hidden_size),
            spec.positions,
        )
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
        self._positions: Tensor | None = None

    def parameters(self) -> ParameterTable:
        table = self._encoder.parameters() | self._patches.parameters() | self._connector.parameters()
        shape = (self._vision.table**2, self._vision.shape.hidden_size)
        return table | {self._table: Parameter(shape, self._making.dtype, self._put_positions)}

    def reading(self, images: Sequence[Image]) -> Reading:
        size = self._vision.shape.patch_size
        rows, columns = images[0].height // size, images[0].width // size
        places = self._placed(rows, columns)
        x = torch.cat([self._embedded(each, rows, columns) + places for each in images])
        metadata = apart(rows * columns, len(images), self._making.backend)
        hidden, _ = yield from self._encoder.pieces(x, metadata)
        return [self._connector.of(each, rows, columns) for each in hidden.chunk(len(images))]

    def _embedded(self, image: Image, rows: int, columns: int) -> Tensor:
        """Patches by rows, whose pixels' colours stand side by side, [rows * columns, hidden]."""
        size, pixels = self._vision.shape.patch_size, normalised(image, self._vision.colours)
        cut = pixels.view(rows, size, columns, size, 3).transpose(1, 2).reshape(rows * columns, -1)
        return self._patches.packed(cut.to(self._making.dtype).contiguous(), NO_ADAPTERS)

    def _placed(self, rows: int, columns: int) -> Tensor:
        """Positions of patches by rows, [rows * columns, hidden]. Interpolated in float32."""
        assert self._positions is not None, "weights are not loaded"
        side = self._vision.table
        square = self._positions.view(1, side, side, -1).permute(0, 3, 1, 2).float()
        found = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return found[0].flatten(1).T.to(self._making.dtype)

    def _put_positions(self, table: Tensor) -> None:
        self._positions = table
