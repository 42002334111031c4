"""LFM2-VL's SigLIP 2 tower (Tschannen et al., 2025) for any image shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import PixelShuffleMLP
from quire.engine.encoders.vision.square_tower import siglip_spec
from quire.engine.encoders.vision.tower import (
    ChannelLastPatchEmbedding,
    ChunkedEncoding,
    Tower,
    TowerBuildContext,
    lengths_of_equal_sequences,
    normalize_pixels,
)
from quire.engine.families.vision.lfm2_vl import Lfm2VisionSpec
from quire.engine.layers.parameters import ParameterTable, make_loadable_parameter, merge_parameters

_TOWER = "vision_tower"


class Lfm2Tower(Tower):
    unused_prefixes = (f"{_TOWER}.head.",)

    def __init__(self, vision: Lfm2VisionSpec, build_context: TowerBuildContext) -> None:
        shape = vision.tower_shape
        self._vision, self._build_context = vision, build_context
        spec = siglip_spec(shape, _TOWER)
        self._encoder = build_context.make_encoder(spec.encoder)
        self._patch_embedding, self._position_table_name = (
            ChannelLastPatchEmbedding(build_context, shape, spec.patch_embedding, bias=True),
            spec.position_embedding,
        )
        self._projector = PixelShuffleMLP(
            build_context,
            shape.hidden_size,
            vision.merge_size,
            vision.projector_activation,
            "multi_modal_projector",
            intermediate_size=vision.projector_hidden_size,
            bias=vision.has_projector_bias,
            norm=vision.has_projector_norm,
        )
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        shape = (self._vision.positions_per_side**2, self._vision.tower_shape.hidden_size)
        table = {
            self._position_table_name: make_loadable_parameter(
                self._weights, "positions", shape, self._build_context.dtype
            )
        }
        return merge_parameters(self._encoder, self._patch_embedding, self._projector) | table

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
        """Return [rows * columns, hidden], interpolated in float32."""
        side = self._vision.positions_per_side
        square = self._weights["positions"].view(1, side, side, -1).permute(0, 3, 1, 2).float()
        resized = F.interpolate(square, (rows, columns), mode="bilinear", align_corners=False, antialias=True)
        return resized[0].flatten(1).T.to(self._build_context.dtype)
