"""LLaVA (Liu et al., 2023), LLaVA-NeXT (Liu et al., 2024) and LLaVA-OneVision (Li et al., 2024): a square CLIP (Radford
et al., 2021) or SigLIP tower. LLaVA reads an image as one square. The others also cut it into squares, and end each row
of patches with a learned token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.common.errors import ModelError
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    SquareTowerSpec,
    SquareTowerVisionSpec,
    clip_tower_spec,
    mlp_projector_shapes,
    siglip_tower_spec,
)
from quire.engine.families.base.vision.vision_spec import (
    CLIP_MEAN,
    CLIP_STD,
    HALF_RGB,
    ImageLayout,
    InvalidImage,
    TokenSpeller,
    TowerShape,
    VisionConfig,
)
from quire.engine.families.vision.pixtral import PixtralVisionSpec, pixtral_vision_spec

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_DEFAULT_PINPOINTS = ([336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008])
_MAX_ASPECT_RATIO = 200
_MAX_PADDED_SIDE = 8192
"""Longest side in pixels of an image that is padded to a square."""
_MAX_SQUARES = 64
TOWER = "vision_tower"
PROJECTOR = "multi_modal_projector"
NEWLINE = "image_newline"
TowerKind = Literal["clip", "siglip"]
_TOWER_KINDS: dict[str, TowerKind] = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVisionSpec(SquareTowerVisionSpec):
    tower_kind: TowerKind
    square_side: int
    uses_class_token: bool
    """The text model also reads CLIP's class token."""
    center_crops: bool
    """Images are cropped after their shorter side is resized."""
    projector_activation: str
    has_projector_bias: bool
    num_skipped_layers: int
    grid_pinpoints: tuple[tuple[int, int], ...] = ()
    """(height, width). Images are resized and padded to one of these sizes, then cut. If empty, images are not cut."""
    max_squares: int | None = None
    """If an image has over 1.21 times the patches of this many squares, its features are interpolated to about these
    patches.
    """
    cuts_only_single_images: bool = False
    """Several images are each padded to a square instead."""
    has_newline_token: bool = False

    @property
    def patches_per_side(self) -> int:
        return self.square_side // self.tower_shape.patch_size

    @property
    def tokens_per_square(self) -> int:
        return self.patches_per_side**2 + self.uses_class_token

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> SquaresLayout:
        if self.grid_pinpoints and not low_detail and not (has_other_images and self.cuts_only_single_images):
            return SquaresLayout(self, (width, height), choose_pinpoint(self.grid_pinpoints, width, height))
        if self.center_crops and max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise InvalidImage(
                f"the image has {width} x {height} pixels; one side may be {_MAX_ASPECT_RATIO} times the other"
            )
        if self.cuts_only_single_images and max(width, height) > _MAX_PADDED_SIDE:
            raise InvalidImage(
                f"the image has {width} x {height} pixels; with other images in the request no side may exceed "
                f"{_MAX_PADDED_SIDE}"
            )
        return SquaresLayout(self, (width, height), None)

    def mean_attended_patches(self, content: Content) -> float:
        return self.patches_per_side**2

    def find_unpadded_region(self, original: tuple[int, int], pinpoint: tuple[int, int]) -> UnpaddedPatchRegion:
        """`original` and `pinpoint` are (height, width)."""
        rows, columns = (each // self.square_side * self.patches_per_side for each in pinpoint)
        height, width = original
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows = rows - 2 * top
        columns = columns - 2 * left
        interpolated_shape = None
        if self.max_squares is not None:
            ratio = math.sqrt(rows * columns / (self.max_squares * self.patches_per_side**2))
            interpolated_shape = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None
        return UnpaddedPatchRegion(top, left, rows, columns, interpolated_shape)

    def image_pinpoint(self, content: Content) -> tuple[int, int] | None:
        """(height, width); None if the image was not cut."""
        if content.height == self.square_side or content.original is None:
            return None
        height, width = content.original
        return choose_pinpoint(self.grid_pinpoints, width, height)

    @property
    def tower_spec(self) -> SquareTowerSpec:
        if self.tower_kind == "clip":
            return clip_tower_spec(self.tower_shape, TOWER, self.patches_per_side)
        return siglip_tower_spec(self.tower_shape, TOWER, self.patches_per_side, final_norm=False)

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden, bias = self.tower_shape.hidden_size, self.has_projector_bias
        shapes = self.tower_spec.parameter_shapes()
        shapes |= mlp_projector_shapes(PROJECTOR, hidden, text_size, text_size, bias=bias)
        return shapes | ({NEWLINE: (text_size,)} if self.has_newline_token else {})


@dataclass(frozen=True, slots=True)
class UnpaddedPatchRegion:
    """Positions are in the grid of all squares."""

    top: int
    left: int
    rows: int
    columns: int
    interpolated_shape: tuple[int, int] | None

    @property
    def shape_after_interpolation(self) -> tuple[int, int]:
        return self.interpolated_shape or (self.rows, self.columns)


def llava_vision_spec(config: VisionConfig) -> LlavaVisionSpec | PixtralVisionSpec:
    """Raises ModelError."""
    if config.tower.get("model_type") == "pixtral":
        return pixtral_vision_spec(config)
    vision = _base_llava_vision_spec(
        config,
        center_crops=config.preprocessor.get("do_center_crop") is not False
        and not config.preprocessor_size().get("height"),
    )
    if config.preprocessor.get("do_pad"):
        raise ModelError("model: preprocessor_config.json: do_pad: true is not served for this family")
    return vision


def llava_next_vision_spec(config: VisionConfig) -> LlavaVisionSpec:
    """Raises ModelError."""
    pinpoints = (
        config.model_fields.get("image_grid_pinpoints")
        or config.preprocessor.get("image_grid_pinpoints")
        or _DEFAULT_PINPOINTS
    )
    vision = _base_llava_vision_spec(config, center_crops=False)
    if vision.uses_class_token:
        raise config.config_error("vision_feature_select_strategy: 'full' is not served for this family with CLIP")
    return replace(
        vision, has_newline_token=True, grid_pinpoints=_parse_pinpoints(config, pinpoints, vision.square_side)
    )


def llava_onevision_vision_spec(config: VisionConfig) -> LlavaVisionSpec:
    """Raises ModelError."""
    vision = _base_llava_vision_spec(config, center_crops=False)
    default = [
        [rows * vision.square_side, columns * vision.square_side] for rows in range(1, 7) for columns in range(1, 7)
    ]
    pinpoints = (
        config.model_fields.get("image_grid_pinpoints") or config.preprocessor.get("image_grid_pinpoints") or default
    )
    ratio = config.model_fields.get("vision_aspect_ratio") or "anyres_max_9"
    most = ratio.removeprefix("anyres_max_")
    if not ratio.startswith("anyres_max_") or not most.isdecimal() or int(most) == 0:
        raise config.config_error(f"vision_aspect_ratio: {ratio!r} is not served, 'anyres_max_9' and the like are")
    cut = _parse_pinpoints(config, pinpoints, vision.square_side)
    vision = replace(
        vision, has_newline_token=True, grid_pinpoints=cut, max_squares=int(most), cuts_only_single_images=True
    )
    return replace(vision, normalization=config.pixel_normalization(CLIP_MEAN, CLIP_STD))


def _base_llava_vision_spec(config: VisionConfig, *, center_crops: bool) -> LlavaVisionSpec:
    name = str(config.tower.get("model_type") or "clip_vision_model")
    if (kind := _TOWER_KINDS.get(name)) is None:
        raise config.config_error(f"vision_config: model_type: {name!r} is not served, {', '.join(_TOWER_KINDS)} are")
    clip = kind == "clip"
    eps, act = (1e-5, "quick_gelu") if clip else (1e-6, "gelu_pytorch_tanh")
    shape = config.tower_shape(
        hidden=1024 if clip else 768, inner=4096, layers=24, heads=16, patch=14, act=act, eps=eps
    )
    side = config.image_size(336 if clip else 384)
    config.check_patches(side, shape)
    strategy = config.model_fields.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full") or (strategy == "default" and not clip):
        raise config.config_error(f"vision_feature_select_strategy: {strategy!r} is not served for {name}")
    check_preprocessor_makes_squares(config, side, center_crops=center_crops)
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (HALF_RGB, HALF_RGB)
    return LlavaVisionSpec(
        tower_shape=(shape_up_to_layer := _tower_up_to_feature_layer(config, shape)),
        normalization=config.pixel_normalization(mean, std),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=config.image_token_id(32000),
        tower_kind=kind,
        square_side=side,
        uses_class_token=clip and strategy == "full",
        center_crops=center_crops,
        projector_activation=config.model_fields.get("projector_hidden_act") or "gelu",
        has_projector_bias=config.model_fields.get("multimodal_projector_bias") is not False,
        num_skipped_layers=shape.num_layers - shape_up_to_layer.num_layers,
    )


def check_preprocessor_makes_squares(config: VisionConfig, side: int, *, center_crops: bool) -> None:
    """Raises ModelError."""
    sizes, crop = config.preprocessor_size(), config.preprocessor.get("crop_size")
    resized_side = sizes.get("height") or sizes.get("shortest_edge") or side
    cut = resized_side if crop is None else crop if isinstance(crop, int) else crop.get("height") or resized_side
    if side not in (resized_side, cut) or (not center_crops and resized_side != side):
        raise ModelError(
            f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels, not {resized_side}"
        )


def _tower_up_to_feature_layer(config: VisionConfig, shape: TowerShape) -> TowerShape:
    layer = config.model_fields.get("vision_feature_layer")
    layer = -2 if layer is None else layer
    if isinstance(layer, list):
        raise config.config_error(f"vision_feature_layer: one layer is served, got {layer}")
    count = layer if layer >= 0 else shape.num_layers + 1 + layer
    if not 1 <= count <= shape.num_layers:
        raise config.config_error(f"vision_feature_layer: {layer} of {shape.num_layers} layers")
    return replace(shape, num_layers=count)


def _parse_pinpoints(
    config: VisionConfig, pinpoints: Sequence[Sequence[int]], side: int
) -> tuple[tuple[int, int], ...]:
    for height, width in pinpoints:
        if height % side or width % side or height * width > _MAX_SQUARES * side * side:
            limit = f"at most {_MAX_SQUARES} squares of {side} pixels"
            raise config.config_error(f"image_grid_pinpoints: {height} x {width} are not {limit}")
    return tuple((height, width) for height, width in pinpoints)


@dataclass(frozen=True, slots=True)
class SquaresLayout(ImageLayout):
    vision: LlavaVisionSpec
    image_size: tuple[int, int]
    """(width, height)"""
    pinpoint: tuple[int, int] | None
    """(height, width); None if the image becomes one square."""

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        vision = self.vision
        if self.pinpoint is None:
            return ((vision.tokens_per_square + vision.has_newline_token,),)
        rows, columns = vision.find_unpadded_region(self.image_size[::-1], self.pinpoint).shape_after_interpolation
        return ((vision.tokens_per_square + rows * (columns + 1),),)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        return spell(self.vision.image_token_id) * self.num_tokens

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        vision, side = self.vision, self.vision.square_side
        resample = Image.Resampling(vision.resample_filter)
        if self.pinpoint is None:
            square = self._make_whole_image_square(image, resample)
            yield Content.from_pixels(side, side, square.tobytes())
            return
        height, width = self.pinpoint
        wide, high = fit_size_within(*self.image_size, width, height)
        padded = Image.new("RGB", (width, height))
        padded.paste(image.resize((wide, high), resample=resample), ((width - wide) // 2, (height - high) // 2))
        squares = [image.resize((side, side), resample=resample)]
        squares += [
            padded.crop((left, top, left + side, top + side))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        pixels = b"".join(each.tobytes() for each in squares)
        yield Content.from_pixels(side * len(squares), side, pixels, original=self.image_size[::-1])

    def _make_whole_image_square(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        from PIL import Image

        (width, height), side = self.image_size, self.vision.square_side
        if self.vision.center_crops:
            shorter = min(width, height)
            wide, high = (side if each == shorter else int(side * each / shorter) for each in (width, height))
            left, top = (wide - side) // 2, (high - side) // 2
            return image.resize((wide, high), resample=resample).crop((left, top, left + side, top + side))
        if self.vision.cuts_only_single_images:
            longest = max(width, height)
            ground = Image.new(
                "RGB", (longest, longest), tuple(int(each * 255) for each in self.vision.normalization.mean)
            )
            ground.paste(image, ((longest - width) // 2, (longest - height) // 2))
            image = ground
        return image.resize((side, side), resample=resample)


def choose_pinpoint(pinpoints: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Return the (height, width) that keeps the most pixels. Among equals, it needs the least padding."""

    def preference(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept_pixels = min(int(width * scale) * int(height * scale), width * height)
        return kept_pixels, kept_pixels - size[0] * size[1]

    return max(pinpoints, key=preference)


def fit_size_within(width: int, height: int, max_width: int, max_height: int) -> tuple[int, int]:
    across, down = max_width / width, max_height / height
    if across < down:
        return max_width, min(math.ceil(height * across), max_height)
    return min(math.ceil(width * down), max_width), max_height


LLAVA = MultimodalFamily(
    model_types=("llava",),
    text_model_type="llama",
    read_vision_spec=llava_vision_spec,
)
LLAVA_NEXT = MultimodalFamily(
    model_types=("llava_next",),
    text_model_type="llama",
    read_vision_spec=llava_next_vision_spec,
)
LLAVA_ONEVISION = MultimodalFamily(
    model_types=("llava_onevision",),
    text_model_type="qwen2",
    read_vision_spec=llava_onevision_vision_spec,
)
