"""Square towers with learned positions: SigLIP (Zhai et al., 2023), CLIP (Radford et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames
from quire.engine.common.types import Image
from quire.engine.encoders.vision.projectors import Projector
from quire.engine.encoders.vision.tower import (
    ChunkedEncoding,
    PatchEmbedding,
    Tower,
    TowerBuildContext,
    lengths_of_equal_sequences,
    normalize_pixels,
    tower_encoder_spec,
)
from quire.engine.families.base.vision.vision_spec import PixelNormalization, TowerShape
from quire.engine.families.vision.internvl import InternVLVisionSpec
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, make_loadable_parameter, merge_parameters


@dataclass(frozen=True, slots=True)
class SquareTowerSpec:
    encoder: EncoderSpec
    patch_embedding: str
    position_embedding: str
    patch_bias: bool = True
    class_token: str | None = None
    first_norm: str | None = None
    has_batch_axes: bool = False
    """If True, the tensors of class token and positions have leading axes of size 1."""


def siglip_spec(shape: TowerShape, tower: str, *, final_norm: bool = True) -> SquareTowerSpec:
    names = EncoderWeightNames(
        word_embeddings="",
        layer_template=f"{tower}.encoder.layers.{{}}",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.out_proj",
        attention_norm="layer_norm1",
        up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="layer_norm2",
        final_norm=f"{tower}.post_layernorm" if final_norm else None,
    )
    embeddings = f"{tower}.embeddings"
    patches, positions = f"{embeddings}.patch_embedding", f"{embeddings}.position_embedding.weight"
    return SquareTowerSpec(tower_encoder_spec(shape, names), patches, positions)


def clip_spec(shape: TowerShape, tower: str) -> SquareTowerSpec:
    plain = siglip_spec(shape, tower, final_norm=False)
    token, norm = f"{tower}.embeddings.class_embedding", f"{tower}.pre_layrnorm"
    return replace(plain, patch_bias=False, class_token=token, first_norm=norm)


def internvl_spec(vision: InternVLVisionSpec, tower: str) -> SquareTowerSpec:
    """InternVL's tower (Chen et al., 2024)."""
    names = EncoderWeightNames(
        word_embeddings="",
        layer_template=f"{tower}.encoder.layer.{{}}",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.projection_layer",
        attention_norm="layernorm_before",
        up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="layernorm_after",
        final_norm=f"{tower}.layernorm" if vision.has_final_norm else None,
        layer_scales=("lambda_1", "lambda_2"),
        qk_norms=("attention.q_norm", "attention.k_norm") if vision.has_qk_norm else None,
    )
    has_rms_norms = vision.uses_rms_norm
    encoder = replace(
        tower_encoder_spec(vision.tower_shape, names),
        qkv_bias=vision.has_qkv_bias,
        has_rms_norms=has_rms_norms,
        norm_bias=not has_rms_norms,
    )
    embeddings = f"{tower}.embeddings"
    patches, positions = f"{embeddings}.patch_embeddings.projection", f"{embeddings}.position_embeddings"
    return SquareTowerSpec(encoder, patches, positions, class_token=f"{embeddings}.cls_token", has_batch_axes=True)


class SquareTower(Tower):
    def __init__(
        self,
        spec: SquareTowerSpec,
        shape: TowerShape,
        normalization: PixelNormalization,
        position_ids: Tensor,
        trained_side: int,
        build_context: TowerBuildContext,
        projector: Projector,
        *,
        unused: tuple[str, ...] = (),
    ) -> None:
        """`position_ids` [side * side] int64 are row indices of a table of trained_side² rows."""
        self.unused_prefixes = unused
        self._spec = spec
        self._shape = shape
        self._normalization = normalization
        self._dtype = build_context.dtype
        self._device = build_context.device
        self._num_class_tokens = 1 if spec.class_token is not None else 0
        self._position_ids, self._trained_side = position_ids, trained_side
        self._patch_embedding = PatchEmbedding(build_context, shape, spec.patch_embedding, bias=spec.patch_bias)
        self._encoder = build_context.make_encoder(spec.encoder)
        norm = spec.first_norm
        self._first_norm = None if norm is None else LayerNormWeights(norm, shape.hidden_size, bias=True)
        self._projector = projector
        self._positions: Tensor | None = None
        self._weights: dict[str, Tensor] = {}
        self._backend = build_context.backend

    def parameters(self) -> ParameterTable:
        spec, hidden = self._spec, self._shape.hidden_size
        table = merge_parameters(self._encoder, self._patch_embedding, self._projector, self._first_norm)
        rows, outer = self._trained_side**2 + self._num_class_tokens, (1,) if spec.has_batch_axes else ()
        table[spec.position_embedding] = LoadableParameter((*outer, rows, hidden), self._dtype, self._load_positions)
        if spec.class_token is not None:
            shape = (1, 1, hidden) if spec.has_batch_axes else (hidden,)
            table[spec.class_token] = make_loadable_parameter(
                self._weights, "class", shape, self._dtype, lambda token: token.view(1, -1)
            )
        return table

    def encode_in_chunks(self, images: Sequence[Image]) -> ChunkedEncoding:
        return self.encode_squares_in_chunks(
            [normalize_pixels(each, self._normalization, self._device) for each in images]
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
        if self._num_class_tokens:
            x = torch.cat((self._weights["class"], x))
        x = x + self._positions
        norm = self._first_norm
        return x if norm is None else self._backend.layer_norm(x, norm.weight, norm.bias, self._shape.eps)

    def _load_positions(self, table: Tensor) -> None:
        table = table.view(-1, self._shape.hidden_size)
        rows = torch.cat((torch.arange(self._num_class_tokens), self._position_ids + self._num_class_tokens))
        self._positions = F.embedding(rows.to(table.device), table)


def bucketed_position_ids(side: int, trained_side: int) -> Tensor:
    """Return [side * side] int64, computed in float32 to round as transformers does."""
    boundaries = torch.arange(1 / trained_side, 1.0, 1 / trained_side)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    axis_ids = torch.bucketize(fractions, boundaries, right=True)
    return (axis_ids[:, None] * trained_side + axis_ids).flatten()
