from __future__ import annotations

from dataclasses import replace
from math import isqrt

import torch

from quire.engine.encoders.vision.gemma4 import Gemma4Tower
from quire.engine.encoders.vision.lfm2 import Lfm2Tower
from quire.engine.encoders.vision.llava import LlavaTower
from quire.engine.encoders.vision.pixtral import PixtralTower
from quire.engine.encoders.vision.projectors import (
    AttentionPoolingProjector,
    AveragePoolingProjector,
    ClassTokenProjector,
    PixelShuffleMLP,
    PixelShuffleProjector,
    Projector,
    SquarePixelShuffleProjector,
)
from quire.engine.encoders.vision.qwen_vl import QwenVLTower
from quire.engine.encoders.vision.square_tower import SquareTower, bucketed_position_ids
from quire.engine.encoders.vision.tower import Tower, TowerBuildContext
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.engine.families.vision import dual_encoders, gemma3, idefics3, internvl
from quire.engine.families.vision.dual_encoders import DualEncoderVisionSpec
from quire.engine.families.vision.gemma3 import Gemma3VisionSpec
from quire.engine.families.vision.gemma4 import Gemma4VisionSpec
from quire.engine.families.vision.idefics3 import Idefics3VisionSpec
from quire.engine.families.vision.internvl import InternVLVisionSpec
from quire.engine.families.vision.lfm2_vl import Lfm2VisionSpec
from quire.engine.families.vision.llava import LlavaVisionSpec
from quire.engine.families.vision.pixtral import PixtralVisionSpec
from quire.engine.families.vision.qwen_vl import QwenVisionSpec


def make_tower(vision: VisionSpec, build_context: TowerBuildContext) -> Tower:
    """Raises ModelError for an unsupported activation."""
    build_context = replace(build_context, shapes=vision.parameter_shapes(build_context.text_hidden_size))
    match vision:
        case Idefics3VisionSpec():
            return _make_idefics3(vision, build_context)
        case DualEncoderVisionSpec():
            return _make_dual_encoder(vision, build_context)
        case LlavaVisionSpec():
            return LlavaTower(vision, build_context)
        case Gemma3VisionSpec():
            return _make_gemma3(vision, build_context)
        case Gemma4VisionSpec():
            return Gemma4Tower(vision, build_context)
        case InternVLVisionSpec():
            return _make_internvl(vision, build_context)
        case PixtralVisionSpec():
            return PixtralTower(vision, build_context)
        case Lfm2VisionSpec():
            return Lfm2Tower(vision, build_context)
        case QwenVisionSpec():
            return QwenVLTower(vision, build_context)
    raise AssertionError(f"a tower of {type(vision).__name__}")


def _make_idefics3(vision: Idefics3VisionSpec, build_context: TowerBuildContext) -> SquareTower:
    side = vision.tile_side // vision.tower_shape.patch_size
    projector = PixelShuffleProjector(build_context, side, vision.scale_factor, idefics3.PROJECTION)
    position_ids = bucketed_position_ids(side, vision.tower_spec.patches_per_side)
    return SquareTower(vision, position_ids, build_context, projector)


def _make_dual_encoder(vision: DualEncoderVisionSpec, build_context: TowerBuildContext) -> SquareTower:
    shape = vision.tower_shape
    projector: Projector
    if vision.tower_kind == "clip":
        norm, projection = dual_encoders.CLIP_FINAL_NORM, dual_encoders.CLIP_PROJECTION
        projector = ClassTokenProjector(build_context, shape.eps, norm, projection)
    else:
        projector = AttentionPoolingProjector(build_context, shape, dual_encoders.SIGLIP_HEAD)
    unused = (f"{dual_encoders.TOWER}.embeddings.position_ids",)
    return SquareTower(vision, torch.arange(vision.patches_per_side**2), build_context, projector, unused=unused)


def _make_gemma3(vision: Gemma3VisionSpec, build_context: TowerBuildContext) -> SquareTower:
    shape = vision.tower_shape
    side = vision.tower_spec.patches_per_side
    projector = AveragePoolingProjector(
        build_context, side, isqrt(vision.tokens_per_image), shape.eps, gemma3.PROJECTOR_NORM, gemma3.PROJECTION
    )
    unused = (f"{gemma3.TOWER}.head.",)
    return SquareTower(vision, torch.arange(side * side), build_context, projector, unused=unused)


def _make_internvl(vision: InternVLVisionSpec, build_context: TowerBuildContext) -> SquareTower:
    side = vision.tower_spec.patches_per_side
    linears = PixelShuffleMLP(build_context, vision.merge_size, vision.projector_activation, internvl.PROJECTOR)
    projector = SquarePixelShuffleProjector(linears, side)
    unused = (f"{internvl.TOWER}.embeddings.mask_token",)
    return SquareTower(vision, torch.arange(side * side), build_context, projector, unused=unused)
