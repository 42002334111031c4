"""Gemma 3 (Gemma Team, 2025): every image becomes one square."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.common.errors import ModelError
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import SquareTowerSpec, SquareTowerVisionSpec, siglip_tower_spec
from quire.engine.families.base.vision.vision_spec import ImageLayout, TokenSpeller, VisionConfig

if TYPE_CHECKING:
    from PIL import Image

_BILINEAR = 2
TOWER = "vision_tower"
PROJECTOR_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"
PROJECTION = "multi_modal_projector.mm_input_projection_weight"
"""Stored as [in, out], unlike the weights of linears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionSpec(SquareTowerVisionSpec):
    square_side: int
    tokens_per_image: int
    begin_token_id: int
    """Chat templates write only this token for an image. Quire adds the others."""
    end_token_id: int

    @property
    def template_image_token_id(self) -> int:
        return self.begin_token_id

    @property
    def is_bidirectional(self) -> bool:
        return True

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> Gemma3Layout:
        return Gemma3Layout(self)

    @property
    def tower_spec(self) -> SquareTowerSpec:
        return siglip_tower_spec(self.tower_shape, TOWER, self.square_side // self.tower_shape.patch_size)

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden = self.tower_shape.hidden_size
        projector = {PROJECTOR_NORM: (hidden,), PROJECTION: (hidden, text_size)}
        return self.tower_spec.parameter_shapes() | projector


def gemma3_vision_spec(config: VisionConfig) -> Gemma3VisionSpec:
    """Raises ModelError."""
    shape = config.tower_shape(hidden=768, inner=3072, layers=12, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    side, outer = config.image_size(224), config.model_fields
    sizes = config.preprocessor_size()
    tokens = outer.get("mm_tokens_per_image") or 256
    patches_per_side = side // shape.patch_size
    config.check_patches(side, shape)
    if not config.parameters_only and (isqrt(tokens) ** 2 != tokens or patches_per_side % isqrt(tokens)):
        raise config.config_error(
            f"mm_tokens_per_image: {tokens} are no square of {patches_per_side} x {patches_per_side} patches"
        )
    if config.preprocessor and (sizes.get("height"), sizes.get("width")) not in ((side, side), (None, None)):
        raise ModelError(f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels")
    if config.preprocessor.get("do_pan_and_scan"):
        raise ModelError("model: preprocessor_config.json: do_pan_and_scan: true is not served")
    return Gemma3VisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(),
        resample_filter=config.resample_filter(_BILINEAR),
        image_token_id=config.image_token_id(262144),
        square_side=side,
        tokens_per_image=tokens,
        begin_token_id=config.token_id_from_field("boi_token_index", 255999),
        end_token_id=config.token_id_from_field("eoi_token_index", 256000),
    )


@dataclass(frozen=True, slots=True)
class Gemma3Layout(ImageLayout):
    vision: Gemma3VisionSpec

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        return ((self.vision.tokens_per_image,),)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        vision = self.vision
        tokens = spell(vision.image_token_id) * vision.tokens_per_image
        return f"\n\n{spell(vision.begin_token_id)}{tokens}{spell(vision.end_token_id)}\n\n"

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        side = self.vision.square_side
        image = image.resize((side, side), resample=Image.Resampling(self.vision.resample_filter))
        yield Content.from_pixels(side, side, image.tobytes())


GEMMA3_WITH_IMAGES = MultimodalFamily(
    model_types=("gemma3",),
    text_model_type="gemma3_text",
    read_vision_spec=gemma3_vision_spec,
)
