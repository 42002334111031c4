"""Gemma 4 (Google, 2026): an image keeps its shape, and is resized to whole squares of patches, as many as a number of
tokens allows; each square becomes a token. Sizes and pixels are those of transformers' image_processing_pil_gemma4.py,
which the tests compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.images.vision import Given, InvalidImage, Layout, Spell, Vision
from quire.engine.types import Image as Content

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
_LOW_TOKENS = 70
"""The most that an image takes of which few are asked for."""
_MOST_TOKENS = 4096
_PLAIN, _UNIT = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4(Vision):
    head_dim: int
    kv_heads: int
    pool: int
    """By each side, the patches whose mean becomes a token."""
    most_tokens: int
    table: int
    """Rows of the table of positions, for columns and for rows of patches."""
    theta: float
    """Of the patches' rotations."""
    clipped: bool
    """Linears have bounds of what they read and give."""
    standardized: bool
    """Tokens are moved and scaled before they are projected."""
    begin_id: int
    """Of the token before an image,"""
    end_id: int
    """and of the one behind it."""
    together: bool
    """Whether the tokens of an image see each other."""

    @property
    def whole(self) -> bool:
        return self.together

    @property
    def longest(self) -> int:
        return self.most_tokens

    @property
    def unit(self) -> int:
        """The side of what becomes a token, in pixels."""
        return self.shape.patch_size * self.pool

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Pooled:
        most = min(self.most_tokens, _LOW_TOKENS) if low else self.most_tokens
        return Pooled(self, *squares(width, height, self.unit, most))

    @property
    def linear_numbers(self) -> int:
        shape, heads = self.shape, (self.shape.num_heads + self.kv_heads) * self.head_dim
        return shape.num_layers * shape.hidden_size * (2 * heads + 3 * shape.intermediate_size)

    def numbers(self, text_size: int) -> int:
        shape, hidden = self.shape, self.shape.hidden_size
        layer = 4 * hidden + 2 * self.head_dim + 4 * 7 * self.clipped
        first = (3 * shape.patch_size**2 + 2 * self.table) * hidden
        return (
            self.linear_numbers + shape.num_layers * layer + first + 2 * hidden * self.standardized + hidden * text_size
        )


def gemma4(given: Given) -> Gemma4:
    """Raises ModelError."""
    tower, preparing = given.tower, given.preparing
    shape = given.shape(hidden=768, inner=3072, layers=16, heads=12, patch=16, act="gelu_pytorch_tanh", eps=1e-6)
    head_dim, kv_heads = tower.get("head_dim") or 64, tower.get("num_key_value_heads") or 12
    if head_dim % 4 or shape.num_heads % kv_heads:
        raise given.wrong(f"vision_config: head_dim: {shape.num_heads} heads of {head_dim} for {kv_heads} keys")
    if (act := tower.get("hidden_activation") or shape.activation) != "gelu_pytorch_tanh":
        raise given.wrong(f"vision_config: hidden_activation: {act!r} is not served")
    pool, most = tower.get("pooling_kernel_size") or 3, preparing.get("max_soft_tokens") or 280
    table = tower.get("position_embedding_size") or 10240
    for name, own in {"patch_size": shape.patch_size, "pooling_kernel_size": pool}.items():
        if (asked := preparing.get(name)) is not None and asked != own:
            raise given.wrong(f"vision_config: {name} is {own}, in preprocessor_config.json {asked}")
    if not given.planned and (most > _MOST_TOKENS or most * pool > table):
        raise given.wrong(f"vision_config: position_embedding_size: {table} for images of {most} tokens")
    rope, normalized = tower.get("rope_parameters") or {}, bool(preparing.get("do_normalize"))
    theta, eps = rope.get("rope_theta"), tower.get("rms_norm_eps")
    return Gemma4(
        shape=shape if eps is None else replace(shape, eps=eps),
        colours=given.colours(_PLAIN, _UNIT, asked=normalized),
        resample=given.resample(_BICUBIC),
        image_token_id=given.image_token(258880),
        head_dim=head_dim,
        kv_heads=kv_heads,
        pool=pool,
        most_tokens=most,
        table=table,
        theta=float(theta) if isinstance(theta, int | float) and theta >= 1 else 100.0,
        clipped=bool(tower.get("use_clipped_linears")),
        standardized=bool(tower.get("standardize")),
        begin_id=given.token_id("boi_token_id", 255999),
        end_id=given.token_id("eoi_token_id", 258882),
        together=given.text.get("use_bidirectional_attention") == "vision",
    )


@dataclass(frozen=True, slots=True)
class Pooled(Layout):
    vision: Gemma4
    columns: int
    """Of tokens."""
    rows: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        return ((self.columns * self.rows,),)

    def shown(self, spell: Spell) -> str:
        vision = self.vision
        return f"{spell(vision.begin_id)}{spell(vision.image_token_id) * self.tokens}{spell(vision.end_id)}"

    def contents(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        width, height = self.columns * self.vision.unit, self.rows * self.vision.unit
        if image.size != (width, height):
            image = image.resize((width, height), resample=Image.Resampling(self.vision.resample))
        yield Content.of(height, width, image.tobytes())


def squares(width: int, height: int, unit: int, most: int) -> tuple[int, int]:
    """Columns and rows of the most squares of unit x unit pixels, `most` at most, into which an image of about this
    shape fits. Raises InvalidImage."""
    factor = math.sqrt(most * unit**2 / (height * width))
    rows, columns = (math.floor(factor * each / unit) for each in (height, width))
    if rows == 0 and columns:
        rows, columns = 1, min(width // height, most)
    elif columns == 0 and rows:
        rows, columns = min(height // width, most), 1
    if not 0 < rows * columns <= most:
        raise InvalidImage(f"the image has {width} x {height} pixels, which are not {most} squares or fewer")
    return columns, rows
