"""Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: an image keeps its shape, and its tokens stand by rows, each of
which ends with a token of text. Sizes and pixels are those of transformers' image_processing_pil_pixtral.py, which the
tests compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.engine.images.vision import CLIP_MEAN, CLIP_STD, Given, Layout, Merging, Spell
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_MOST_PATCHES = 256
"""By each side of an image."""
_LOW_EDGE = 512
"""The longest side of an image that is to take few tokens."""
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixtral(Merging):
    merges: bool
    """Whether these go through a norm and a linear of their own first."""
    longest_edge: int
    """An image whose longer side exceeds it is made smaller."""
    theta: float
    """Of the patches' rotations."""
    act: str
    """Between the linears that make tokens."""
    bias: bool
    """Of these linears."""
    norm_eps: float
    """Of the norm before patches are merged."""

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Rows:
        longest = min(self.longest_edge, _LOW_EDGE) if low else self.longest_edge
        ratio = max(width, height) / longest
        if ratio > 1:
            width, height = (max(math.floor(each / ratio), 1) for each in (width, height))
        columns, rows = (-(-each // self.unit) for each in (width, height))
        return Rows(self, rows, columns)

    @property
    def gated(self) -> bool:
        return True

    def numbers(self, text_size: int) -> int:
        hidden = self.shape.hidden_size
        first = 3 * self.shape.patch_size**2 * hidden + hidden
        merger = hidden + self.merge**2 * hidden * hidden if self.merges else 0
        linears = hidden * text_size + text_size * text_size + 2 * text_size * self.bias
        return self.shape.layer_numbers(gated=self.gated, bias=False, norm_bias=False) + first + merger + linears


def mistral3(given: Given) -> Pixtral:
    """Raises ModelError."""
    return _pixtral(given, merge=given.outer.get("spatial_merge_size") or 2, merges=True, patch=14, longest=1540)


def pixtral(given: Given) -> Pixtral:
    """As a tower of LLaVA's. Raises ModelError."""
    return _pixtral(given, merge=1, merges=False, patch=16, longest=1024)


def _pixtral(given: Given, *, merge: int, merges: bool, patch: int, longest: int) -> Pixtral:
    shape = given.shape(hidden=1024, inner=4096, layers=24, heads=16, patch=patch, act="gelu", eps=1e-5)
    if (size := shape.hidden_size // shape.num_heads) % 4:
        raise given.wrong(f"vision_config: num_attention_heads: heads of {size} cannot be rotated by row and column")
    layer = given.outer.get("vision_feature_layer")
    if layer not in (-1, shape.num_layers) and not (merges and layer is None):
        raise given.wrong(f"vision_feature_layer: the last layer (-1) is served for this tower, got {layer}")
    longest = given.sizes().get("longest_edge") or longest
    if not given.planned and not shape.patch_size * merge <= longest <= shape.patch_size * _MOST_PATCHES:
        raise given.wrong(f"vision_config: patch_size: images of {longest} pixels are not 1 to {_MOST_PATCHES} patches")
    rope, bias = given.tower.get("rope_parameters") or {}, given.outer.get("multimodal_projector_bias")
    theta, eps = rope.get("rope_theta") or given.tower.get("rope_theta"), given.text.get("rms_norm_eps")
    return Pixtral(
        shape=shape,
        colours=given.colours(CLIP_MEAN, CLIP_STD),
        resample=given.resample(_BICUBIC),
        image_token_id=given.image_token(10 if merges else 32000),
        merge=merge,
        merges=merges,
        longest_edge=longest,
        theta=float(theta) if isinstance(theta, int | float) and theta >= 1 else 10000.0,
        act=given.outer.get("projector_hidden_act") or "gelu",
        bias=not merges if bias is None else bias,
        norm_eps=float(eps) if isinstance(eps, int | float) else 1e-5 if merges else 1e-6,
    )


@dataclass(frozen=True, slots=True)
class Rows(Layout):
    vision: Pixtral
    rows: int
    """Of tokens."""
    columns: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        return ((self.columns,) * self.rows,)

    def shown(self, spell: Spell) -> str:
        row = spell(self.vision.image_token_id) * self.columns
        return _BREAK.join([row] * self.rows) + _END

    def contents(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        unit = self.vision.unit
        width, height = self.columns * unit, self.rows * unit
        image = image.resize((width, height), resample=Image.Resampling(self.vision.resample))
        yield Content.of(height, width, image.tobytes())
