"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): an image and a text have vectors that are compared, and
no prompt has both. Pixels are those of transformers' image_processing_pil_*.py, which the tests compare with."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.images.llava import Kind, Llava, Squares, check_square
from quire.engine.images.vision import CLIP_MEAN, CLIP_STD, HALF, Given

_BICUBIC = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Llava):
    """A tower over one square, whose features are one vector."""

    size: int
    """Of the vector."""

    @property
    def apart(self) -> bool:
        return True

    def layout(self, width: int, height: int, *, low: bool = False, several: bool = False) -> Alone:
        Llava.layout(self, width, height)
        return Alone(self, (width, height), None)

    def numbers(self, text_size: int) -> int:
        """Beside a text part; what projects its vectors is that part's."""
        hidden, inner, patch = self.shape.hidden_size, self.shape.intermediate_size, self.shape.patch_size
        first = (3 * patch**2 + self.along**2) * hidden
        if self.kind == "clip":
            return self.shape.layer_numbers() + first + (1 + 1 + 2 + 2) * hidden + hidden * self.size
        attention = 4 * hidden * hidden + 4 * hidden
        head = hidden + attention + 2 * hidden + 2 * hidden * inner + inner + hidden
        return self.shape.layer_numbers() + first + (1 + 2) * hidden + head


@dataclass(frozen=True, slots=True)
class Alone(Squares):
    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        return ((1,),)


def clip(given: Given) -> Pair:
    """Raises ModelError."""
    return _pair(given, "clip", patch=32, act="quick_gelu", eps=1e-5, size=given.outer.get("projection_dim") or 512)


def siglip(given: Given) -> Pair:
    """Raises ModelError."""
    return _pair(given, "siglip", patch=16, act="gelu_pytorch_tanh", eps=1e-6, size=None)


def _pair(given: Given, kind: Kind, *, patch: int, act: str, eps: float, size: int | None) -> Pair:
    if given.tower.get("vision_use_head") is False:
        raise given.wrong("vision_config: vision_use_head: false is not served")
    shape = given.shape(hidden=768, inner=3072, layers=12, heads=12, patch=patch, act=act, eps=eps)
    side, crops = given.image_size(224), kind == "clip" and given.preparing.get("do_center_crop") is not False
    given.check_patches(side, shape)
    check_square(given, side, crops=crops)
    mean, std = (CLIP_MEAN, CLIP_STD) if kind == "clip" else (HALF, HALF)
    return Pair(
        shape=shape,
        colours=given.colours(mean, std),
        resample=given.resample(_BICUBIC),
        image_token_id=0,
        kind=kind,
        side=side,
        class_token=True,
        crops=crops,
        act=act,
        bias=True,
        behind=0,
        size=size or shape.hidden_size,
    )
