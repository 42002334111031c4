"""Pixtral's tower (Agrawal et al., 2024), and Mistral Small 3.1's patch merger."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import MLPProjector
from quire.engine.encoders.vision.tower import (
    ChunkedEncoding,
    PatchEmbedding,
    Tower,
    TowerBuildContext,
    axial_rope_table,
    lengths_of_equal_sequences,
    normalize_pixels,
    rope_frequencies,
)
from quire.engine.families.vision.pixtral import (
    FIRST_NORM,
    MERGER,
    MERGER_NORM,
    PATCH_EMBEDDING,
    PROJECTOR,
    PixtralVisionSpec,
)
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.kernels.backend import NO_ADAPTERS


class PixtralTower(Tower):
    def __init__(self, vision: PixtralVisionSpec, build_context: TowerBuildContext) -> None:
        self._vision, self._build_context = vision, build_context
        self._encoder = build_context.make_encoder(vision.encoder_spec)
        self._patch_embedding = PatchEmbedding(build_context, PATCH_EMBEDDING)
        self._first_norm = build_context.make_norm(FIRST_NORM)
        self._projector = MLPProjector(build_context, vision.projector_activation, PROJECTOR)
        self._merger_norm: LayerNormWeights | None = None
        self._merger: FusedLinear | None = None
        if vision.has_patch_merger:
            self._merger_norm = build_context.make_norm(MERGER_NORM)
            self._merger = build_context.make_unquantized_linear(MERGER)

    def parameters(self) -> ParameterTable:
        merger = (self._merger_norm, self._merger)
        return merge_parameters(self._encoder, self._patch_embedding, self._first_norm, self._projector, *merger)

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        vision = self._vision
        shape = self._vision.tower_shape
        backend = self._build_context.backend
        device = self._build_context.device
        rows, columns = images[0].height // shape.patch_size, images[0].width // shape.patch_size
        x = torch.cat(
            [self._patch_embedding(normalize_pixels(image, vision.normalization, device)) for image in images]
        )
        x = backend.rms_norm(x, self._first_norm.weight, 1e-5)
        patch_ids = torch.arange(rows * columns, device=device)
        inverse_frequencies = rope_frequencies(shape.hidden_size // shape.num_heads, vision.rope_theta, device)
        cos_sin = axial_rope_table(
            patch_ids // columns, patch_ids % columns, inverse_frequencies[0::2], inverse_frequencies[1::2]
        ).repeat(len(images), 1)
        hidden, _ = yield from self._encoder.forward_in_chunks(
            x, lengths_of_equal_sequences(rows * columns, len(images)), cos_sin
        )
        merged = (
            self._merge_patches(features, rows, columns) if vision.has_patch_merger else features
            for features in hidden.chunk(len(images))
        )
        return [self._projector(features) for features in merged]

    def _merge_patches(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        merge = self._vision.merge_size
        assert self._merger_norm is not None
        assert self._merger is not None
        x = self._build_context.backend.rms_norm(hidden, self._merger_norm.weight, self._vision.merger_norm_eps)
        squares = x.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        return self._merger.packed_linear(squares.reshape(rows * columns // merge**2, -1).contiguous(), NO_ADAPTERS)
