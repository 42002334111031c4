"""LLaVA (Liu et al., 2023), LLaVA-NeXT (Liu et al., 2024) and LLaVA-OneVision (Li et al., 2024): a square tower, CLIP
(Radford et al., 2021) or SigLIP, and two linears that make a token of each patch. The first reads one square of an
image; the others one that shows all of it and those that it is cut into, whose patches stand by rows of the image, each
with a learned token at its end. Sizes and pixels are those of transformers' image_processing_pil_*.py, which the tests
compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from quire.engine.errors import ModelError
from quire.engine.images.pixtral import Pixtral, pixtral
from quire.engine.images.vision import CLIP_MEAN, CLIP_STD, HALF, Given, InvalidImage, Layout, Spell, TowerShape, Vision
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_PINPOINTS = ([336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008])
_MOST_RATIO = 200
_LONGEST = 8192
"""The side of a square that an image is padded to."""
_MOST_SQUARES = 64
"""That an image is cut into."""
Kind = Literal["clip", "siglip"]
_KINDS: dict[str, Kind] = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Llava(Vision):
    kind: Kind
    side: int
    """Of the square, in pixels."""
    class_token: bool
    """Whether CLIP's, which stands before the patches, is a token too."""
    crops: bool
    """Whether the shorter side is resized to the square's, and the middle cut out; else both sides are."""
    act: str
    """Between the linears."""
    bias: bool
    """Of the linears."""
    behind: int
    """Layers of the tower behind the one whose output is taken."""
    pinpoints: tuple[tuple[int, int], ...] = ()
    """Heights and widths that an image is resized and padded to, to be cut into squares; (): it is not cut."""
    most_squares: int | None = None
    """The patches of so many squares are kept, at most, or interpolated to be so many."""
    only_alone: bool = False
    """Of several images none is cut; they are padded to be square."""
    newline: bool = False
    """Whether rows end with a learned token."""

    @property
    def along(self) -> int:
        """Patches by each side of a square."""
        return self.side // self.shape.patch_size

    @property
    def square_tokens(self) -> int:
        return self.along**2 + self.class_token

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Squares:
        if self.pinpoints and not low and not (several and self.only_alone):
            return Squares(self, (width, height), best_of(self.pinpoints, width, height))
        if self.crops and max(width, height) > _MOST_RATIO * min(width, height):
            raise InvalidImage(
                f"the image has {width} x {height} pixels; one side may be {_MOST_RATIO} times the other"
            )
        if self.only_alone and max(width, height) > _LONGEST:
            raise InvalidImage(f"the image has {width} x {height} pixels; beside others no side may exceed {_LONGEST}")
        return Squares(self, (width, height), None)

    def seen(self, content: Content) -> float:
        return self.along**2

    def kept(self, original: tuple[int, int], best: tuple[int, int]) -> Kept:
        """Which patches of the squares of an image of this height and width are kept."""
        rows, columns = (each // self.side * self.along for each in best)
        height, width = original
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns, wanted = rows - 2 * top, columns - 2 * left, None
        if self.most_squares is not None:
            ratio = math.sqrt(rows * columns / (self.most_squares * self.along**2))
            wanted = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None
        return Kept(top, left, rows, columns, wanted)

    def best(self, content: Content) -> tuple[int, int] | None:
        """The height and width that were cut into the squares of a content."""
        if content.height == self.side or content.original is None:
            return None
        height, width = content.original
        return best_of(self.pinpoints, width, height)

    def numbers(self, text_size: int) -> int:
        hidden, patch, clip = self.shape.hidden_size, self.shape.patch_size, self.kind == "clip"
        first = 3 * patch**2 * hidden + (3 * hidden if clip else hidden) + (self.along**2 + clip) * hidden
        linears = hidden * text_size + text_size * text_size + 2 * text_size * self.bias
        return self.shape.layer_numbers() + first + linears + self.newline * text_size


@dataclass(frozen=True, slots=True)
class Kept:
    """Of the patches of all squares together, those of the image itself, without what it was padded with."""

    top: int
    left: int
    rows: int
    columns: int
    wanted: tuple[int, int] | None
    """Rows and columns that they are interpolated to; None: they are not."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.wanted or (self.rows, self.columns)


def llava(given: Given) -> Llava | Pixtral:
    """Raises ModelError."""
    if given.tower.get("model_type") == "pixtral":
        return pixtral(given)
    vision = _llava(given, crops=given.preparing.get("do_center_crop") is not False and not given.sizes().get("height"))
    if given.preparing.get("do_pad"):
        raise ModelError("model: preprocessor_config.json: do_pad: true is not served for this family")
    return vision


def llava_next(given: Given) -> Llava:
    """Raises ModelError."""
    pinpoints = given.outer.get("image_grid_pinpoints") or given.preparing.get("image_grid_pinpoints") or _PINPOINTS
    vision = _llava(given, crops=False)
    if vision.class_token:
        raise given.wrong("vision_feature_select_strategy: 'full' is not served for this family with CLIP")
    return replace(vision, newline=True, pinpoints=_checked(given, pinpoints, vision.side))


def llava_onevision(given: Given) -> Llava:
    """Raises ModelError."""
    vision = _llava(given, crops=False)
    default = [[rows * vision.side, columns * vision.side] for rows in range(1, 7) for columns in range(1, 7)]
    pinpoints = given.outer.get("image_grid_pinpoints") or given.preparing.get("image_grid_pinpoints") or default
    ratio = given.outer.get("vision_aspect_ratio") or "anyres_max_9"
    most = ratio.removeprefix("anyres_max_")
    if not ratio.startswith("anyres_max_") or not most.isdecimal() or int(most) == 0:
        raise given.wrong(f"vision_aspect_ratio: {ratio!r} is not served, 'anyres_max_9' and the like are")
    cut = _checked(given, pinpoints, vision.side)
    vision = replace(vision, newline=True, pinpoints=cut, most_squares=int(most), only_alone=True)
    return replace(vision, colours=given.colours(CLIP_MEAN, CLIP_STD))


def _llava(given: Given, *, crops: bool) -> Llava:
    """What all of them have. Raises ModelError."""
    name = str(given.tower.get("model_type") or "clip_vision_model")
    if (kind := _KINDS.get(name)) is None:
        raise given.wrong(f"vision_config: model_type: {name!r} is not served, {', '.join(_KINDS)} are")
    clip = kind == "clip"
    eps, act = (1e-5, "quick_gelu") if clip else (1e-6, "gelu_pytorch_tanh")
    shape = given.shape(hidden=1024 if clip else 768, inner=4096, layers=24, heads=16, patch=14, act=act, eps=eps)
    side = given.image_size(336 if clip else 384)
    given.check_patches(side, shape)
    strategy = given.outer.get("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full") or (strategy == "default" and not clip):
        raise given.wrong(f"vision_feature_select_strategy: {strategy!r} is not served for {name}")
    check_square(given, side, crops=crops)
    mean, std = (CLIP_MEAN, CLIP_STD) if clip else (HALF, HALF)
    return Llava(
        shape=(upto := _upto(given, shape)),
        colours=given.colours(mean, std),
        resample=given.resample(_BICUBIC),
        image_token_id=given.image_token(32000),
        kind=kind,
        side=side,
        class_token=clip and strategy == "full",
        crops=crops,
        act=given.outer.get("projector_hidden_act") or "gelu",
        bias=given.outer.get("multimodal_projector_bias") is not False,
        behind=shape.num_layers - upto.num_layers,
    )


def check_square(given: Given, side: int, *, crops: bool) -> None:
    """Raise ModelError unless images are prepared to be squares of this side."""
    sizes, crop = given.sizes(), given.preparing.get("crop_size")
    asked = sizes.get("height") or sizes.get("shortest_edge") or side
    cut = asked if crop is None else crop if isinstance(crop, int) else crop.get("height") or asked
    if side not in (asked, cut) or (not crops and asked != side):
        raise ModelError(f"model: preprocessor_config.json: size: the tower reads {side} x {side} pixels, not {asked}")


def _upto(given: Given, shape: TowerShape) -> TowerShape:
    """The tower up to the layer whose output is taken. Raises ModelError."""
    layer = given.outer.get("vision_feature_layer")
    layer = -2 if layer is None else layer
    if isinstance(layer, list):
        raise given.wrong(f"vision_feature_layer: one layer is served, got {layer}")
    count = layer if layer >= 0 else shape.num_layers + 1 + layer
    if not 1 <= count <= shape.num_layers:
        raise given.wrong(f"vision_feature_layer: {layer} of {shape.num_layers} layers")
    return replace(shape, num_layers=count)


def _checked(given: Given, pinpoints: Sequence[Sequence[int]], side: int) -> tuple[tuple[int, int], ...]:
    for height, width in pinpoints:
        if height % side or width % side or height * width > _MOST_SQUARES * side * side:
            wanted = f"at most {_MOST_SQUARES} squares of {side} pixels"
            raise given.wrong(f"image_grid_pinpoints: {height} x {width} are not {wanted}")
    return tuple((height, width) for height, width in pinpoints)


@dataclass(frozen=True, slots=True)
class Squares(Layout):
    vision: Llava
    size: tuple[int, int]
    """The image's own width and height."""
    best: tuple[int, int] | None
    """The height and width that it is resized and padded to; None: it becomes one square."""

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        vision = self.vision
        if self.best is None:
            return ((vision.square_tokens + vision.newline,),)
        rows, columns = vision.kept(self.size[::-1], self.best).shape
        return ((vision.square_tokens + rows * (columns + 1),),)

    def shown(self, spell: Spell) -> str:
        return spell(self.vision.image_token_id) * self.tokens

    def contents(self, image: Image.Image) -> Iterator[Content]:
        """All squares, one below the other: first the one that shows the whole image."""
        from PIL import Image

        vision, side = self.vision, self.vision.side
        resample = Image.Resampling(vision.resample)
        if self.best is None:
            square = self._square(image, resample)
            yield Content.of(side, side, square.tobytes())
            return
        height, width = self.best
        wide, high = fitted(*self.size, width, height)
        padded = Image.new("RGB", (width, height))
        padded.paste(image.resize((wide, high), resample=resample), ((width - wide) // 2, (height - high) // 2))
        squares = [image.resize((side, side), resample=resample)]
        squares += [
            padded.crop((left, top, left + side, top + side))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        pixels = b"".join(each.tobytes() for each in squares)
        yield Content.of(side * len(squares), side, pixels, original=self.size[::-1])

    def _square(self, image: Image.Image, resample: Image.Resampling) -> Image.Image:
        from PIL import Image

        (width, height), side = self.size, self.vision.side
        if self.vision.crops:
            shorter = min(width, height)
            wide, high = (side if each == shorter else int(side * each / shorter) for each in (width, height))
            left, top = (wide - side) // 2, (high - side) // 2
            return image.resize((wide, high), resample=resample).crop((left, top, left + side, top + side))
        if self.vision.only_alone:
            longest = max(width, height)
            ground = Image.new("RGB", (longest, longest), tuple(int(each * 255) for each in self.vision.colours.mean))
            ground.paste(image, ((longest - width) // 2, (longest - height) // 2))
            image = ground
        return image.resize((side, side), resample=resample)


def best_of(pinpoints: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """The height and width in which most of an image of this size is kept, and least is wasted."""

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(pinpoints, key=rank)


def fitted(width: int, height: int, most_wide: int, most_high: int) -> tuple[int, int]:
    """Width and height of an image that is resized to fit."""
    across, down = most_wide / width, most_high / height
    if across < down:
        return most_wide, min(math.ceil(height * across), most_high)
    return min(math.ceil(width * down), most_wide), most_high
