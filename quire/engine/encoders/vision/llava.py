"""LLaVA's tower over one square, and in LLaVA-NeXT and LLaVA-OneVision (Liu et al., 2024; Li et al., 2024) over those
that an image is cut into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.vision.connectors import TwoLinears
from quire.engine.encoders.vision.squares import SquareTower, clip, siglip
from quire.engine.encoders.vision.tower import Reading, Tower, TowerMaking, normalised
from quire.engine.images.llava import Llava
from quire.engine.layers.parameters import ParameterTable, held
from quire.engine.types import Image

_TOWER, _CONNECTOR, _NEWLINE = "vision_tower", "multi_modal_projector", "image_newline"


class LlavaTower(Tower):
    def __init__(self, vision: Llava, making: TowerMaking) -> None:
        shape, of_clip = vision.shape, vision.kind == "clip"
        self.unused = (f"{_TOWER}.post_layernorm.", f"{_TOWER}.head.", f"{_TOWER}.embeddings.position_ids")
        behind = range(shape.num_layers, shape.num_layers + vision.behind)
        self.unused += tuple(f"{_TOWER}.encoder.layers.{index}." for index in behind)
        spec = clip(shape, _TOWER) if of_clip else siglip(shape, _TOWER, final_norm=False)
        skipped = int(of_clip and not vision.class_token)
        connector = TwoLinears(making, shape.hidden_size, vision.act, _CONNECTOR, bias=vision.bias, skipped=skipped)
        places = torch.arange(vision.along**2)
        self._square = SquareTower(spec, shape, vision.colours, places, vision.along, making, connector)
        self._vision, self._making = vision, making
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = self._square.parameters()
        if self._vision.newline:
            size = (self._making.text_size,)
            table[_NEWLINE] = held(self._weights, _NEWLINE, size, self._making.dtype, lambda token: token[None])
        return table

    def reading(self, images: Sequence[Image]) -> Reading:
        pixels = (normalised(each, self._vision.colours, self._making.device) for each in images)
        squares = [square for each in pixels for square in each.split(self._vision.side)]
        found = yield from self._square.read(squares)
        each = len(found) // len(images)
        return [self._joined(image, found[at * each :][:each]) for at, image in enumerate(images)]

    def _joined(self, image: Image, squares: list[Tensor]) -> Tensor:
        """The features of an image by those of its squares, of which the first shows all of it."""
        if not self._vision.newline:
            return squares[0]
        best = self._vision.best(image)
        if best is None:
            return torch.cat((squares[0], self._weights[_NEWLINE]))
        assert image.original is not None
        return torch.cat((squares[0], self._rows(torch.stack(squares[1:]), image.original, best)))

    def _rows(self, squares: Tensor, original: tuple[int, int], best: tuple[int, int]) -> Tensor:
        """[squares, along * along, text] to the patches of the image by rows, each with a token at its end."""
        vision = self._vision
        down, across = best[0] // vision.side, best[1] // vision.side
        grid = squares.view(down, across, vision.along, vision.along, -1).transpose(1, 2)
        grid = grid.reshape(down * vision.along, across * vision.along, -1)
        kept = vision.kept(original, best)
        grid = grid[kept.top : kept.top + kept.rows, kept.left : kept.left + kept.columns]
        if kept.wanted is not None:
            channels = grid.permute(2, 0, 1)[None].float()
            grid = F.interpolate(channels, kept.wanted, mode="bilinear")[0].permute(1, 2, 0).to(squares.dtype)
        return torch.cat((grid, self._weights[_NEWLINE].expand(len(grid), 1, -1)), dim=1).flatten(0, 1)
