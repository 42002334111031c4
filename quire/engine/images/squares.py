"""Families whose tower reads every image as one square: Gemma 3 (Gemma Team, 2025). Pixels are those of transformers'
image_processing_pil_gemma3.py, which the tests compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from quire.engine.errors import ModelError
from quire.engine.images.vision import Given, Layout, Spell, Vision
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BILINEAR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(Vision):
    """Average pooling, and a projection without a bias, make the tokens; they see each other."""

    side: int
    """Of the square, in pixels."""
    tokens: int
    begin_id: int
    """Of the token before an image; chat templates write it alone."""
    end_id: int

    @property
    def mark_id(self) -> int:
        return self.begin_id

    @property
    def whole(self) -> bool:
        return True

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Square:
        return Square(self)

    def numbers(self, text_size: int) -> int:
        hidden, patch = self.shape.hidden_size, self.shape.patch_size
        ends = (3 * patch**2 + 1 + (self.side // patch) ** 2 + 2) * hidden
        return self.shape.layer_numbers() + ends + hidden + hidden * text_size


def gemma3(given: Given) -> Gemma3:
    """Raises ModelError."""
    shape = given.shape(hidden=768, inner=3072, layers=12, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    side, outer = given.image_size(224), given.outer
    sizes = given.sizes()
    tokens = outer.get("mm_tokens_per_image") or 256
    along = side // shape.patch_size
    given.check_patches(side, shape)
    if not given.planned and (isqrt(tokens) ** 2 != tokens or along % isqrt(tokens)):
        raise given.wrong(f"mm_tokens_per_image: {tokens} are no square of {along} x {along} patches")
    if given.preparing and (sizes.get("height"), sizes.get("width")) not in ((side, side), (None, None)):
        raise ModelError(f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels")
    if given.preparing.get("do_pan_and_scan"):
        raise ModelError("model: preprocessor_config.json: do_pan_and_scan: true is not served")
    return Gemma3(
        shape=shape,
        colours=given.colours(),
        resample=given.resample(_BILINEAR),
        image_token_id=given.image_token(262144),
        side=side,
        tokens=tokens,
        begin_id=given.token_id("boi_token_index", 255999),
        end_id=given.token_id("eoi_token_index", 256000),
    )


@dataclass(frozen=True, slots=True)
class Square(Layout):
    vision: Gemma3

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        return ((self.vision.tokens,),)

    def shown(self, spell: Spell) -> str:
        vision = self.vision
        tokens = spell(vision.image_token_id) * vision.tokens
        return f"\n\n{spell(vision.begin_id)}{tokens}{spell(vision.end_id)}\n\n"

    def contents(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        side = self.vision.side
        image = image.resize((side, side), resample=Image.Resampling(self.vision.resample))
        yield Content.of(side, side, image.tobytes())
