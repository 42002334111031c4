"""Pixtral's tower (Agrawal et al., 2024), and Mistral Small 3.1's patch merger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.engine.architecture.encoder import EncoderWeightNames
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
    tower_encoder_spec,
)
from quire.engine.families.vision.pixtral import PixtralVisionSpec
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.kernels.backend import NO_ADAPTERS

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_NAMES = EncoderWeightNames(
    word_embeddings="",
    layer_template=f"{_TOWER}.transformer.layers.{{}}",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    attention_norm="attention_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    mlp_norm="ffn_norm",
)


class PixtralTower(Tower):
    def __init__(self, vision: PixtralVisionSpec, build_context: TowerBuildContext) -> None:
        shape = vision.tower_shape
        self._vision, self._build_context = vision, build_context
        plain = {"has_rms_norms": True, "bias": False, "norm_bias": False, "gated": True}
        spec = replace(tower_encoder_spec(replace(shape, eps=1e-5), _NAMES), **plain)  # type: ignore[arg-type]
        self._encoder = build_context.make_encoder(spec)
        self._patch_embedding = PatchEmbedding(build_context, shape, f"{_TOWER}.patch_conv", bias=False)
        self._first_norm = LayerNormWeights(f"{_TOWER}.ln_pre", shape.hidden_size, bias=False)
        hidden, merged = shape.hidden_size, shape.hidden_size * vision.merge_size**2
        self._norm = LayerNormWeights(f"{_PROJECTOR}.norm", hidden, bias=False)
        self._merger = build_context.make_unquantized_linear(
            merged, f"{_PROJECTOR}.patch_merger.merging_layer", hidden, bias=False
        )
        self._projector = MLPProjector(
            build_context, hidden, vision.projector_activation, _PROJECTOR, bias=vision.has_projector_bias
        )

    def parameters(self) -> ParameterTable:
        merging = (self._norm, self._merger) if self._vision.has_patch_merger else ()
        return merge_parameters(self._encoder, self._patch_embedding, self._first_norm, self._projector, *merging)

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
        x = self._build_context.backend.rms_norm(hidden, self._norm.weight, self._vision.merger_norm_eps)
        squares = x.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3)
        return self._merger.packed_linear(squares.reshape(rows * columns // merge**2, -1).contiguous(), NO_ADAPTERS)
