"""Weights that several vision towers have: layers, patch embeddings, projectors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from math import prod

from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames, parse_encoder_activation
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, linear_sizes, norm_shapes
from quire.engine.families.base.vision.vision_spec import TowerShape, VisionSpec

_COLORS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderVisionSpec(VisionSpec):
    @property
    @abstractmethod
    def encoder_spec(self) -> EncoderSpec:
        """Raises ModelError for an unsupported activation."""

    @property
    def num_linear_parameters(self) -> int:
        encoder = self.encoder_spec
        layers = (encoder.layer_shapes(index) for index in range(encoder.num_layers))
        return sum(prod(sizes) for layer in layers for sizes in linear_sizes(layer).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchMergingVisionSpec(EncoderVisionSpec):
    merge_size: int

    @property
    def merged_patch_size(self) -> int:
        return self.tower_shape.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class SquareTowerSpec:
    """A tower with learned positions, for images of one size."""

    encoder: EncoderSpec
    patch_size: int
    patches_per_side: int
    """Of training images."""
    patch_embedding: str
    position_embedding: str
    patch_bias: bool = True
    class_token: str | None = None
    first_norm: str | None = None
    has_batch_axes: bool = False
    """True if the tensors of class token and positions have leading axes of size 1."""

    def parameter_shapes(self) -> ParameterShapes:
        hidden = self.encoder.hidden_size
        shapes = self.encoder.parameter_shapes()
        shapes |= patch_convolution_shapes(self.patch_embedding, hidden, self.patch_size, bias=self.patch_bias)
        rows = self.patches_per_side**2 + (self.class_token is not None)
        shapes[self.position_embedding] = (1, rows, hidden) if self.has_batch_axes else (rows, hidden)
        if self.class_token is not None:
            shapes[self.class_token] = (1, 1, hidden) if self.has_batch_axes else (hidden,)
        if self.first_norm is not None:
            shapes |= layer_norm_shapes(self.first_norm, hidden)
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareTowerVisionSpec(EncoderVisionSpec):
    @property
    @abstractmethod
    def tower_spec(self) -> SquareTowerSpec:
        """Raises ModelError for an unsupported activation."""

    @property
    def encoder_spec(self) -> EncoderSpec:
        return self.tower_spec.encoder


def pre_norm_encoder_spec(shape: TowerShape, names: EncoderWeightNames) -> EncoderSpec:
    """Return an encoder without positions. Raises ModelError for an unsupported activation."""
    return EncoderSpec(
        names=names,
        vocab_size=0,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        eps=shape.eps,
        ropes=(None,) * shape.num_layers,
        windows=(None,) * shape.num_layers,
        classifier=lambda hidden, labels: [],
        activation=parse_encoder_activation(shape.activation, "vision_config: hidden_act"),
        pre_norm=True,
        has_first_layer_norm=True,
    )


def siglip_tower_spec(
    shape: TowerShape, tower: str, patches_per_side: int, *, final_norm: bool = True
) -> SquareTowerSpec:
    """SigLIP: Zhai et al., 2023."""
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
    return SquareTowerSpec(
        encoder=pre_norm_encoder_spec(shape, names),
        patch_size=shape.patch_size,
        patches_per_side=patches_per_side,
        patch_embedding=f"{tower}.embeddings.patch_embedding",
        position_embedding=f"{tower}.embeddings.position_embedding.weight",
    )


def clip_tower_spec(shape: TowerShape, tower: str, patches_per_side: int) -> SquareTowerSpec:
    """CLIP: Radford et al., 2021."""
    return replace(
        siglip_tower_spec(shape, tower, patches_per_side, final_norm=False),
        patch_bias=False,
        class_token=f"{tower}.embeddings.class_embedding",
        first_norm=f"{tower}.pre_layrnorm",
    )


def patch_convolution_shapes(
    name: str, hidden_size: int, patch_size: int, *, bias: bool, frames: int = 0
) -> ParameterShapes:
    """If `frames` is not 0, the kernel covers this many video frames."""
    depth = (frames,) if frames else ()
    shapes: ParameterShapes = {f"{name}.weight": (hidden_size, _COLORS, *depth, patch_size, patch_size)}
    return shapes | ({f"{name}.bias": (hidden_size,)} if bias else {})


def patch_linear_shapes(name: str, hidden_size: int, patch_size: int, *, bias: bool) -> ParameterShapes:
    return linear_shapes([name], hidden_size, _COLORS * patch_size**2, bias=bias)


def layer_norm_shapes(name: str, size: int) -> ParameterShapes:
    return norm_shapes({name: size}, NormSpec(0.0, is_layer_norm=True, bias=True))


def mlp_projector_shapes(
    name: str, in_features: int, intermediate_size: int, text_size: int, *, bias: bool
) -> ParameterShapes:
    shapes = linear_shapes([f"{name}.linear_1"], intermediate_size, in_features, bias=bias)
    return shapes | linear_shapes([f"{name}.linear_2"], text_size, intermediate_size, bias=bias)
