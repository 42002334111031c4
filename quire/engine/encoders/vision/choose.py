"""Which tower a family has."""

from __future__ import annotations

from math import isqrt

import torch

from quire.engine.encoders.vision.connectors import (
    AttentionPooled,
    ClassVector,
    Connector,
    Pooled,
    Shuffled,
    ShuffledLinears,
    ShuffledSquare,
)
from quire.engine.encoders.vision.gemma4 import Gemma4Tower
from quire.engine.encoders.vision.grids import GridTower
from quire.engine.encoders.vision.lfm2 import Lfm2Tower
from quire.engine.encoders.vision.llava import LlavaTower
from quire.engine.encoders.vision.pixtral import PixtralTower
from quire.engine.encoders.vision.squares import SquareTower, clip, internvl, places_of, siglip
from quire.engine.encoders.vision.tower import Tower, TowerMaking
from quire.engine.images.gemma4 import Gemma4
from quire.engine.images.internvl import InternVL
from quire.engine.images.lfm2 import Lfm2
from quire.engine.images.llava import Llava
from quire.engine.images.pairs import Pair
from quire.engine.images.patches import Patched
from quire.engine.images.pixtral import Pixtral
from quire.engine.images.squares import Gemma3
from quire.engine.images.tiles import Tiled
from quire.engine.images.vision import Vision


def tower_of(vision: Vision, making: TowerMaking) -> Tower:
    """Raises ModelError for an activation that is not computed."""
    match vision:
        case Tiled():
            return _idefics3(vision, making)
        case Pair():
            return _pair(vision, making)
        case Llava():
            return LlavaTower(vision, making)
        case Gemma3():
            return _gemma3(vision, making)
        case Gemma4():
            return Gemma4Tower(vision, making)
        case InternVL():
            return _internvl(vision, making)
        case Pixtral():
            return PixtralTower(vision, making)
        case Lfm2():
            return Lfm2Tower(vision, making)
        case Patched():
            return GridTower(vision, making)
    raise AssertionError(f"a tower of {type(vision).__name__}")


def _idefics3(vision: Tiled, making: TowerMaking) -> SquareTower:
    shape = vision.shape
    side, trained = vision.tile // shape.patch_size, vision.image_size // shape.patch_size
    connector = Shuffled(making, shape.hidden_size, side, vision.scale_factor, "connector.modality_projection.proj")
    spec = siglip(shape, "vision_model")
    return SquareTower(spec, shape, vision.colours, places_of(side, trained), trained, making, connector)


def _pair(vision: Pair, making: TowerMaking) -> SquareTower:
    shape, tower = vision.shape, "vision_model"
    places = torch.arange(vision.along**2)
    if vision.kind == "clip":
        norm, spec = f"{tower}.post_layernorm", clip(shape, tower)
        connector: Connector = ClassVector(making, shape.hidden_size, shape.eps, norm, "visual_projection")
    else:
        spec, connector = siglip(shape, tower), AttentionPooled(making, shape, f"{tower}.head")
    unused = (f"{tower}.embeddings.position_ids",)
    return SquareTower(spec, shape, vision.colours, places, vision.along, making, connector, unused=unused)


def _gemma3(vision: Gemma3, making: TowerMaking) -> SquareTower:
    shape = vision.shape
    side = vision.side // shape.patch_size
    connector = Pooled(making, shape.hidden_size, side, isqrt(vision.tokens), shape.eps, "multi_modal_projector")
    spec, unused = siglip(shape, "vision_tower"), ("vision_tower.head.",)
    places = torch.arange(side * side)
    return SquareTower(spec, shape, vision.colours, places, side, making, connector, unused=unused)


def _internvl(vision: InternVL, making: TowerMaking) -> SquareTower:
    shape = vision.shape
    side, places = vision.side // shape.patch_size, torch.arange((vision.side // shape.patch_size) ** 2)
    linears = ShuffledLinears(making, shape.hidden_size, vision.merge, vision.act, "multi_modal_projector")
    connector = ShuffledSquare(linears, side)
    spec, unused = internvl(vision, "vision_tower"), ("vision_tower.embeddings.mask_token",)
    return SquareTower(spec, shape, vision.colours, places, side, making, connector, unused=unused)
