"""Towers of LLaVA, LLaVA-NeXT (Liu et al., 2024) and LLaVA-OneVision (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import MLPProjector
from quire.engine.encoders.vision.square_tower import SquareTower
from quire.engine.encoders.vision.tower import ChunkedEncoding, Tower, TowerBuildContext, normalize_pixels
from quire.engine.families.vision.llava import NEWLINE, PROJECTOR, TOWER, LlavaVisionSpec
from quire.engine.layers.parameters import ParameterTable


class LlavaTower(Tower):
    def __init__(self, vision: LlavaVisionSpec, build_context: TowerBuildContext) -> None:
        num_layers = vision.tower_shape.num_layers
        unused_layers = range(num_layers, num_layers + vision.num_skipped_layers)
        self.unused_prefixes = (
            f"{TOWER}.post_layernorm.",
            f"{TOWER}.head.",
            f"{TOWER}.embeddings.position_ids",
            *(f"{TOWER}.encoder.layers.{index}." for index in unused_layers),
        )
        num_skipped = int(vision.tower_kind == "clip" and not vision.uses_class_token)
        projector = MLPProjector(build_context, vision.projector_activation, PROJECTOR, num_skipped=num_skipped)
        position_ids = torch.arange(vision.patches_per_side**2)
        self._square_tower = SquareTower(vision, position_ids, build_context, projector)
        self._vision, self._build_context = vision, build_context
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = self._square_tower.parameters()
        if self._vision.has_newline_token:
            table[NEWLINE] = self._build_context.make_parameter(self._weights, NEWLINE, lambda token: token[None])
        return table

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        pixels = (normalize_pixels(image, self._vision.normalization, self._build_context.device) for image in images)
        squares = [square for image_pixels in pixels for square in image_pixels.split(self._vision.square_side)]
        features = yield from self._square_tower.encode_squares_in_chunks(squares)
        squares_per_image = len(features) // len(images)
        return [
            self._join_squares(image, features[at * squares_per_image :][:squares_per_image])
            for at, image in enumerate(images)
        ]

    def _join_squares(self, image: Image, squares: list[Tensor]) -> Tensor:
        """The first square shows the whole image."""
        if not self._vision.has_newline_token:
            return squares[0]
        best = self._vision.image_pinpoint(image)
        if best is None:
            return torch.cat((squares[0], self._weights[NEWLINE]))
        assert image.original is not None
        return torch.cat((squares[0], self._assemble_unpadded_grid(torch.stack(squares[1:]), image.original, best)))

    def _assemble_unpadded_grid(self, squares: Tensor, original: tuple[int, int], best: tuple[int, int]) -> Tensor:
        """Convert [squares, side², text_hidden] to row-major patches without padding, with a newline token after each
        row.
        """
        vision = self._vision
        down, across = best[0] // vision.square_side, best[1] // vision.square_side
        grid = squares.view(down, across, vision.patches_per_side, vision.patches_per_side, -1).transpose(1, 2)
        grid = grid.reshape(down * vision.patches_per_side, across * vision.patches_per_side, -1)
        crop = vision.find_unpadded_region(original, best)
        grid = grid[crop.top : crop.top + crop.rows, crop.left : crop.left + crop.columns]
        if crop.interpolated_shape is not None:
            channels = grid.permute(2, 0, 1)[None].float()
            grid = (
                F.interpolate(channels, crop.interpolated_shape, mode="bilinear")[0].permute(1, 2, 0).to(squares.dtype)
            )
        return torch.cat((grid, self._weights[NEWLINE].expand(len(grid), 1, -1)), dim=1).flatten(0, 1)
