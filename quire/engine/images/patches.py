"""Families whose tower reads an image at its own shape: Qwen2-VL (Wang et al., 2024), Qwen2.5-VL (Bai et al., 2025),
Qwen3-VL (Qwen Team, 2025) and Qwen3.5. An image is resized to whole squares of merge x merge patches, each of which
becomes a token. Sizes and pixels are those of transformers' image_processing_pil_qwen2_vl.py, which the tests compare
with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.images.vision import (
    CLIP_MEAN,
    CLIP_STD,
    Given,
    InvalidImage,
    Layout,
    Merging,
    Spell,
    TowerShape,
    Vision,
)
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_MOST_RATIO = 200
"""Of an image's sides."""
_LOW_TOKENS = 256
"""The most that an image takes of which few are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched(Merging):
    frames: int
    """A patch is of so many frames of a video; of an image these are alike."""
    fewest: int
    """Pixels of an image that is resized, at least,"""
    most: int
    """and at most."""
    out_size: int
    """Of a token's features."""
    table: int = 0
    """Rows of the table of positions, a square; 0: there is none."""
    window: int = 0
    """The side, in pixels, of the squares outside of which a patch sees nothing; 0: there are none."""
    full_layers: tuple[int, ...] = ()
    """Those in which it sees the whole image all the same."""
    tapped: tuple[int, ...] = ()
    """The tower's layers behind which features are taken for the text part's first layers (Meng et al., 2024)."""
    modern: bool = False
    """Root-mean-square norms and gated linears."""

    @property
    def deep(self) -> int:
        return len(self.tapped)

    def seen(self, content: Content) -> float:
        every = Vision.seen(self, content)
        if not self.window:
            return every
        full = len({*self.full_layers} & {*range(self.shape.num_layers)}) / self.shape.num_layers
        return full * every + (1 - full) * min(every, (self.window // self.shape.patch_size) ** 2)

    def work(self, content: Content) -> int:
        """With what merges patches, each as half a layer."""
        mergers = self.patches(content) * (1 + len(self.tapped)) / 2 / self.shape.num_layers
        return Vision.work(self, content) + math.ceil(mergers)

    @property
    def turns(self) -> bool:
        return True

    def grid(self, content: Content) -> tuple[int, int]:
        return content.height // self.unit, content.width // self.unit

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Whole:
        most = min(self.most, _LOW_TOKENS * self.unit**2) if low else self.most
        return Whole(self, resized(width, height, self.unit, min(self.fewest, most), most))

    @property
    def gated(self) -> bool:
        return self.modern

    def numbers(self, text_size: int) -> int:
        hidden, modern = self.shape.hidden_size, self.modern
        wide = hidden * self.merge**2
        layers = self.shape.layer_numbers(gated=self.gated, norm_bias=not modern)
        first = (3 * self.frames * self.shape.patch_size**2 + bool(self.table) + self.table) * hidden
        linears = wide * wide + wide + wide * self.out_size + self.out_size
        norms = (1 if modern else 2) * hidden + len(self.tapped) * 2 * wide
        return layers + first + linears * (1 + len(self.tapped)) + norms


def qwen2_vl(given: Given) -> Patched:
    """Raises ModelError. Its config.json calls the tower's width embed_dim, and the text part's hidden_size."""
    width = given.tower.get("embed_dim") or 1280
    out = given.tower.get("hidden_size") or 3584
    shape = given.shape(hidden=width, inner=0, layers=32, heads=16, patch=14, act="quick_gelu", eps=1e-6)
    ratio = given.tower.get("mlp_ratio") or 4
    shape = replace(shape, hidden_size=width, intermediate_size=int(width * ratio), eps=1e-6)
    return _patched(given, shape, out)


def qwen2_5_vl(given: Given) -> Patched:
    """Raises ModelError."""
    shape = given.shape(hidden=3584, inner=3420, layers=32, heads=16, patch=14, act="silu", eps=1e-6)
    full = given.tower.get("fullatt_block_indexes")
    vision = _patched(given, shape, given.tower.get("out_hidden_size") or 3584)
    window = given.tower.get("window_size") or 112
    if window < vision.unit:
        raise given.wrong(f"vision_config: window_size: a window of {window} pixels holds no token of {vision.unit}")
    full_layers = (7, 15, 23, 31) if full is None else tuple(full)
    return replace(vision, window=window, full_layers=full_layers, modern=True, shape=replace(shape, eps=1e-6))


def qwen3_vl(given: Given) -> Patched:
    """Raises ModelError. Qwen3.5's tower is the same, with no features behind layers by default."""
    shape = given.shape(hidden=1152, inner=4304, layers=27, heads=16, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    vision = _patched(given, replace(shape, eps=1e-6), given.tower.get("out_hidden_size") or 3584)
    table, asked = given.tower.get("num_position_embeddings") or 2304, given.tower.get("deepstack_visual_indexes")
    tapped = tuple(asked) if asked is not None else () if "3_5" in str(given.text.get("model_type")) else (8, 16, 24)
    if math.isqrt(table) ** 2 != table:
        raise given.wrong(f"vision_config: num_position_embeddings: {table} are no square")
    layers = given.text.get("num_hidden_layers")
    if sorted({*tapped, *range(shape.num_layers)}) != list(range(shape.num_layers)) or list(tapped) != sorted(tapped):
        raise given.wrong(f"vision_config: deepstack_visual_indexes: {list(tapped)} of {shape.num_layers} layers")
    if isinstance(layers, int) and len(tapped) >= layers:
        raise given.wrong(f"vision_config: deepstack_visual_indexes: {len(tapped)} for {layers} layers of text")
    return replace(vision, table=table, tapped=tapped)


def _patched(given: Given, shape: TowerShape, out: int) -> Patched:
    """What all of them have. Raises ModelError."""
    given.check_heads(shape)
    if (size := shape.hidden_size // shape.num_heads) % 4:
        raise given.wrong(f"vision_config: num_heads: heads of {size} cannot be rotated by row and column")
    sizes, preparing = given.sizes(), given.preparing
    merge = given.tower.get("spatial_merge_size") or 2
    fewest = preparing.get("min_pixels") or sizes.get("shortest_edge") or 56 * 56
    most = preparing.get("max_pixels") or sizes.get("longest_edge") or 28 * 28 * 1280
    given.check_prepared({"patch_size": shape.patch_size, "merge_size": merge})
    if most < (shape.patch_size * merge) ** 2 or fewest > most:
        raise given.wrong(f"size (of preprocessor_config.json): from {fewest} to {most} pixels")
    return Patched(
        shape=shape,
        colours=given.colours(CLIP_MEAN, CLIP_STD),
        resample=given.resample(_BICUBIC),
        image_token_id=given.image_token(151655),
        merge=merge,
        frames=given.tower.get("temporal_patch_size") or 2,
        fewest=fewest,
        most=most,
        out_size=out,
    )


@dataclass(frozen=True, slots=True)
class Whole(Layout):
    vision: Patched
    size: tuple[int, int]
    """Width and height that it is resized to."""

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        unit = self.vision.unit
        return ((self.size[0] // unit * (self.size[1] // unit),),)

    def shown(self, spell: Spell) -> str:
        return spell(self.vision.image_token_id) * self.tokens

    def contents(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        width, height = self.size
        image = image.resize(self.size, resample=Image.Resampling(self.vision.resample))
        yield Content.of(height, width, image.tobytes())


def resized(width: int, height: int, unit: int, fewest: int, most: int) -> tuple[int, int]:
    """Width and height, both whole units, of `fewest` to `most` pixels, of about the same ratio. Raises InvalidImage
    for an image that is too narrow."""
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise InvalidImage(f"the image has {width} x {height} pixels; one side may be {_MOST_RATIO} times the other")
    high, wide = round(height / unit) * unit, round(width / unit) * unit
    if high * wide > most:
        beta = math.sqrt(height * width / most)
        high = max(unit, math.floor(height / beta / unit) * unit)
        wide = max(unit, math.floor(width / beta / unit) * unit)
    elif high * wide < fewest:
        beta = math.sqrt(fewest / (height * width))
        high = math.ceil(height * beta / unit) * unit
        wide = math.ceil(width * beta / unit) * unit
    return wide, high
