from __future__ import annotations

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
from quire.engine.encoders.vision.square_tower import (
    SquareTower,
    bucketed_position_ids,
    clip_spec,
    internvl_spec,
    siglip_spec,
)
from quire.engine.encoders.vision.tower import Tower, TowerBuildContext
from quire.engine.families.base.vision.vision_spec import VisionSpec
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
    shape = vision.tower_shape
    side, trained_side = vision.tile_side // shape.patch_size, vision.image_size // shape.patch_size
    connector = PixelShuffleProjector(
        build_context, shape.hidden_size, side, vision.scale_factor, "connector.modality_projection.proj"
    )
    spec = siglip_spec(shape, "vision_model")
    return SquareTower(
        spec,
        shape,
        vision.normalization,
        bucketed_position_ids(side, trained_side),
        trained_side,
        build_context,
        connector,
    )


def _make_dual_encoder(vision: DualEncoderVisionSpec, build_context: TowerBuildContext) -> SquareTower:
    shape, tower = vision.tower_shape, "vision_model"
    position_ids = torch.arange(vision.patches_per_side**2)
    if vision.tower_kind == "clip":
        norm, spec = f"{tower}.post_layernorm", clip_spec(shape, tower)
        connector: Projector = ClassTokenProjector(
            build_context, shape.hidden_size, shape.eps, norm, "visual_projection"
        )
    else:
        spec, connector = siglip_spec(shape, tower), AttentionPoolingProjector(build_context, shape, f"{tower}.head")
    unused = (f"{tower}.embeddings.position_ids",)
    return SquareTower(
        spec,
        shape,
        vision.normalization,
        position_ids,
        vision.patches_per_side,
        build_context,
        connector,
        unused=unused,
    )


def _make_gemma3(vision: Gemma3VisionSpec, build_context: TowerBuildContext) -> SquareTower:
    shape = vision.tower_shape
    side = vision.square_side // shape.patch_size
    connector = AveragePoolingProjector(
        build_context, shape.hidden_size, side, isqrt(vision.tokens_per_image), shape.eps, "multi_modal_projector"
    )
    spec, unused = siglip_spec(shape, "vision_tower"), ("vision_tower.head.",)
    position_ids = torch.arange(side * side)
    return SquareTower(spec, shape, vision.normalization, position_ids, side, build_context, connector, unused=unused)


def _make_internvl(vision: InternVLVisionSpec, build_context: TowerBuildContext) -> SquareTower:
    shape = vision.tower_shape
    side, position_ids = (
        vision.square_side // shape.patch_size,
        torch.arange((vision.square_side // shape.patch_size) ** 2),
    )
    linears = PixelShuffleMLP(
        build_context, shape.hidden_size, vision.merge_size, vision.projector_activation, "multi_modal_projector"
    )
    connector = SquarePixelShuffleProjector(linears, side)
    spec, unused = internvl_spec(vision, "vision_tower"), ("vision_tower.embeddings.mask_token",)
    return SquareTower(spec, shape, vision.normalization, position_ids, side, build_context, connector, unused=unused)
