"""Towers over one square of patches with learned positions: SigLIP (Zhai et al., 2023), CLIP (Radford et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.encoder import EncoderNames, EncoderSpec
from quire.engine.encoders.vision.connectors import Connector
from quire.engine.encoders.vision.tower import (
    Patches,
    Reading,
    Tower,
    TowerMaking,
    apart,
    encoder_spec,
    normalised,
)
from quire.engine.images.internvl import InternVL
from quire.engine.images.vision import Colours, TowerShape
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable, held, parameters_of
from quire.engine.types import Image


@dataclass(frozen=True, slots=True)
class SquareSpec:
    """A tower, by what its tensors are called."""

    encoder: EncoderSpec
    patches: str
    positions: str
    patch_bias: bool = True
    class_token: str | None = None
    """Stands before the patches, and has the first position."""
    first_norm: str | None = None
    """Of what goes into the layers."""
    batched: bool = False
    """The class token and the positions are stored with axes of size 1 before their own."""


def siglip(shape: TowerShape, tower: str, *, final_norm: bool = True) -> SquareSpec:
    """`tower`: how the names of its tensors begin. Raises ModelError for an activation that is not computed."""
    names = EncoderNames(
        words="",
        layer=f"{tower}.encoder.layers.{{}}",
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
    return SquareSpec(encoder_spec(shape, names), patches, positions)


def clip(shape: TowerShape, tower: str) -> SquareSpec:
    """The same, without the norm behind the layers."""
    plain = siglip(shape, tower, final_norm=False)
    token, norm = f"{tower}.embeddings.class_embedding", f"{tower}.pre_layrnorm"
    return replace(plain, patch_bias=False, class_token=token, first_norm=norm)


def internvl(vision: InternVL, tower: str) -> SquareSpec:
    """The same of InternVL's tower (Chen et al., 2024)."""
    names = EncoderNames(
        words="",
        layer=f"{tower}.encoder.layer.{{}}",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.projection_layer",
        attention_norm="layernorm_before",
        up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="layernorm_after",
        final_norm=f"{tower}.layernorm" if vision.final_norm else None,
        scales=("lambda_1", "lambda_2"),
        qk_norms=("attention.q_norm", "attention.k_norm") if vision.qk_norm else None,
    )
    root = vision.root_mean_square
    encoder = replace(
        encoder_spec(vision.shape, names), qkv_bias=vision.qkv_bias, root_mean_square=root, norm_bias=not root
    )
    embeddings = f"{tower}.embeddings"
    patches, positions = f"{embeddings}.patch_embeddings.projection", f"{embeddings}.position_embeddings"
    return SquareSpec(encoder, patches, positions, class_token=f"{embeddings}.cls_token", batched=True)


class SquareTower(Tower):
    def __init__(
        self,
        spec: SquareSpec,
        shape: TowerShape,
        colours: Colours,
        places: Tensor,
        trained: int,
        making: TowerMaking,
        connector: Connector,
        *,
        unused: tuple[str, ...] = (),
    ) -> None:
        """`places` [side * side] int64: the row of each patch in the table of positions, which has trained x trained
        of them."""
        self.unused = unused
        self._spec, self._shape, self._colours, self._dtype = spec, shape, colours, making.dtype
        self._device = making.device
        self._classes = 1 if spec.class_token is not None else 0
        self._places, self._trained = places, trained
        self._patches = Patches(making, shape, spec.patches, bias=spec.patch_bias)
        self._encoder = making.encoder(spec.encoder)
        norm = spec.first_norm
        self._first_norm = None if norm is None else LayerNormWeights(norm, shape.hidden_size, bias=True)
        self._connector = connector
        self._positions: Tensor | None = None
        self._weights: dict[str, Tensor] = {}
        self._backend = making.backend

    def parameters(self) -> ParameterTable:
        spec, hidden = self._spec, self._shape.hidden_size
        table = parameters_of(self._encoder, self._patches, self._connector, self._first_norm)
        rows, outer = self._trained**2 + self._classes, (1,) if spec.batched else ()
        table[spec.positions] = Parameter((*outer, rows, hidden), self._dtype, self._put_positions)
        if spec.class_token is not None:
            shape = (1, 1, hidden) if spec.batched else (hidden,)
            table[spec.class_token] = held(self._weights, "class", shape, self._dtype, lambda token: token.view(1, -1))
        return table

    def reading(self, images: Sequence[Image]) -> Reading:
        return self.read([normalised(each, self._colours, self._device) for each in images])

    def read(self, squares: Sequence[Tensor]) -> Reading:
        """The same of squares' pixels, each [side, side, 3] float32."""
        x = torch.cat([self._embedded(each) for each in squares])
        hidden, _ = yield from self._encoder.pieces(x, apart(len(x) // len(squares), len(squares)))
        return [self._connector(each) for each in hidden.chunk(len(squares))]

    def _embedded(self, pixels: Tensor) -> Tensor:
        """What goes into the layers, [tokens, hidden]."""
        assert self._positions is not None, "weights are not loaded"
        x = self._patches(pixels)
        assert len(x) == len(self._places), "an image that was prepared for another tower"
        if self._classes:
            x = torch.cat((self._weights["class"], x))
        x = x + self._positions
        norm = self._first_norm
        return x if norm is None else self._backend.layer_norm(x, norm.weight, norm.bias, self._shape.eps)

    def _put_positions(self, table: Tensor) -> None:
        table = table.view(-1, self._shape.hidden_size)
        rows = torch.cat((torch.arange(self._classes), self._places + self._classes))
        self._positions = F.embedding(rows.to(table.device), table)


def places_of(side: int, trained: int) -> Tensor:
    """The rows of the table of trained x trained positions for side x side patches, [side * side] int64: those at the
    same fraction of a side. In float32 as transformers computes it, so that what rounding makes of a fraction is the
    same."""
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    along = torch.bucketize(fractions, boundaries, right=True)
    return (along[:, None] * trained + along).flatten()
