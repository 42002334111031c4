"""LFM2-VL's SigLIP 2 tower (Tschannen et al., 2025) for any image shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import PixelShuffleMLP
from quire.engine.encoders.vision.tower import (
    ChannelLastPatchEmbedding,
    ChunkedEncoding,
    Tower,
    TowerBuildContext,
    lengths_of_equal_sequences,
    normalize_pixels,
)
from quire.engine.families.vision.lfm2_vl import PATCH_EMBEDDING, POSITIONS, PROJECTOR, TOWER, Lfm2VisionSpec
from quire.engine.layers.parameters import ParameterTable, merge_parameters


class Lfm2Tower(Tower):
    unused_prefixes = (f"{TOWER}.head.",)

    def __init__(self, vision: Lfm2VisionSpec, build_context: TowerBuildContext) -> None:
        self._vision, self._build_context = vision, build_context
        self._encoder = build_context.make_encoder(vision.encoder_spec)
        self._patch_embedding = ChannelLastPatchEmbedding(build_context, vision.tower_shape.patch_size, PATCH_EMBEDDING)
        self._projector = PixelShuffleMLP(build_context, vision.merge_size, vision.projector_activation, PROJECTOR)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        positions = self._build_context.make_parameter(self._weights, POSITIONS)
        return merge_parameters(self._encoder, self._patch_embedding, self._projector) | {POSITIONS: positions}

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        size = self._vision.tower_shape.patch_size
        rows, columns = images[0].height // size, images[0].width // size
        position_embeddings = self._interpolate_positions(rows, columns)
        pixels = (normalize_pixels(each, self._vision.normalization, self._build_context.device) for each in images)
        x = torch.cat([self._patch_embedding(each) + position_embeddings for each in pixels])
        hidden, _ = yield from self._encoder.forward_in_chunks(
            x, lengths_of_equal_sequences(rows * columns, len(images))
        )
        return [self._projector.project_grid(each, rows, columns) for each in hidden.chunk(len(images))]

    def _interpolate_positions(self, rows: int, columns: int) -> Tensor:
        """Interpolate in float32. Return [rows * columns, hidden] in the model's dtype."""
        side = self._vision.positions_per_side
        square = self._weights[POSITIONS].view(1, side, side, -1).permute(0, 3, 1, 2).float()
        resized = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).T.to(self._build_context.dtype)
