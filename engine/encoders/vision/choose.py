"""Which tower a family has."""

from __future__ import annotations

from math import isqrt

import torch

from quire.engine.encoders.vision.connectors import Pooled, Shuffled, ShuffledLinears
from quire.engine.encoders.vision.gemma4 import Gemma4Tower
from quire.engine.encoders.vision.grids import GridTower
from quire.engine.encoders.vision.llava import LlavaTower
from quire.engine.encoders.vision.pixtral import PixtralTower
from quire.engine.encoders.vision.squares import SquareTower, internvl, places_of, siglip
from quire.engine.encoders.vision.tower import Tower, TowerMaking
from quire.engine.images.gemma4 import Gemma4
from quire.engine.images.internvl import InternVL
from quire.engine.images.llava import Llava
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
        case Patched():
            return GridTower(vision, making)
    raise AssertionError(f"a tower of {type(vision).__name__}")


def _idefics3(vision: Tiled, making: TowerMaking) -> SquareTower:
    shape = vision.shape
    side, trained = vision.tile // shape.patch_size, vision.image_size // shape.patch_size
    connector = Shuffled(making, shape.hidden_size, side, vision.scale_factor, "connector.modality_projection.proj")
    spec = siglip(shape, "vision_model")
    return SquareTower(spec, shape, vision.colours, places_of(side, trained), trained, making, connector)


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
    connector = ShuffledLinears(making, shape.hidden_size, side, vision.merge, vision.act, "multi_modal_projector")
    spec, unused = internvl(vision, "vision_tower"), ("vision_tower.embeddings.mask_token",)
    return SquareTower(spec, shape, vision.colours, places, side, making, connector, unused=unused)
