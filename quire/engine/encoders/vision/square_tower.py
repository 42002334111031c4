"""Square towers with learned positions: SigLIP (Zhai et al., 2023), CLIP (Radford et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import Projector
from quire.engine.encoders.vision.tower import (
    ChunkedEncoding,
    PatchEmbedding,
    Tower,
    TowerBuildContext,
    lengths_of_equal_sequences,
    normalize_pixels,
)
from quire.engine.families.base.vision.tower_spec import SquareTowerVisionSpec
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, merge_parameters


class SquareTower(Tower):
    def __init__(
        self,
        vision: SquareTowerVisionSpec,
        position_ids: Tensor,
        build_context: TowerBuildContext,
        projector: Projector,
        *,
        unused: tuple[str, ...] = (),
    ) -> None:
        """`position_ids` [side * side] int64 are row indices of the position table, without the class token's row."""
        self.unused_prefixes = unused
        self._vision = vision
        self._spec = spec = vision.tower_spec
        self._build_context = build_context
        self._num_class_tokens = 1 if spec.class_token is not None else 0
        self._position_ids = position_ids
        self._patch_embedding = PatchEmbedding(build_context, spec.patch_embedding)
        self._encoder = build_context.make_encoder(spec.encoder)
        self._first_norm = None if spec.first_norm is None else build_context.make_norm(spec.first_norm)
        self._projector = projector
        self._positions: Tensor | None = None
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        spec, build_context = self._spec, self._build_context
        table = merge_parameters(self._encoder, self._patch_embedding, self._projector, self._first_norm)
        table[spec.position_embedding] = LoadableParameter(
            build_context.shapes[spec.position_embedding], build_context.dtype, self._load_positions
        )
        if spec.class_token is not None:
            table[spec.class_token] = build_context.make_parameter(
                self._weights, spec.class_token, lambda token: token.view(1, -1)
            )
        return table

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        return self.encode_squares_in_chunks(
            [normalize_pixels(each, self._vision.normalization, self._build_context.device) for each in images]
        )

    def encode_squares_in_chunks(self, squares: Sequence[Tensor]) -> ChunkedEncoding:
        """Squares are [side, side, 3] float32."""
        x = torch.cat([self._embed_pixels(each) for each in squares])
        hidden, _ = yield from self._encoder.forward_in_chunks(
            x, lengths_of_equal_sequences(len(x) // len(squares), len(squares))
        )
        return [self._projector(each) for each in hidden.chunk(len(squares))]

    def _embed_pixels(self, pixels: Tensor) -> Tensor:
        """Return [tokens, hidden]."""
        assert self._positions is not None, "weights are not loaded"
        x = self._patch_embedding(pixels)
        assert len(x) == len(self._position_ids), "an image that was prepared for another tower"
        if self._spec.class_token is not None:
            x = torch.cat((self._weights[self._spec.class_token], x))
        x = x + self._positions
        norm = self._first_norm
        if norm is None:
            return x
        return self._build_context.backend.layer_norm(x, norm.weight, norm.bias, self._vision.tower_shape.eps)

    def _load_positions(self, table: Tensor) -> None:
        table = table.view(-1, self._vision.tower_shape.hidden_size)
        rows = torch.cat((torch.arange(self._num_class_tokens), self._position_ids + self._num_class_tokens))
        self._positions = F.embedding(rows.to(table.device), table)


def bucketed_position_ids(side: int, trained_side: int) -> Tensor:
    """Return [side * side] int64, computed in float32 to round as transformers does."""
    boundaries = torch.arange(1 / trained_side, 1.0, 1 / trained_side)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    axis_ids = torch.bucketize(fractions, boundaries, right=True)
    return (axis_ids[:, None] * trained_side + axis_ids).flatten()
