"""Qwen2-VL (Wang et al., 2024), Qwen2.5-VL (Bai et al., 2025), Qwen3-VL (Qwen Team, 2025) and Qwen3.5: images are
resized to whole squares of merge x merge patches. Each square becomes a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.common.types import Image as Content
from quire.engine.families.base.vision.multimodal_family import MultimodalFamily
from quire.engine.families.base.vision.tower_spec import (
    PatchMergingVisionSpec,
    patch_convolution_shapes,
    pre_norm_encoder_spec,
)
from quire.engine.families.base.vision.vision_spec import (
    CLIP_MEAN,
    CLIP_STD,
    ImageLayout,
    InvalidImage,
    TokenSpeller,
    TowerShape,
    VisionConfig,
    VisionSpec,
)

if TYPE_CHECKING:
    from PIL import Image

_BICUBIC = 3
PATCH_EMBEDDING = "visual.patch_embed.proj"
POSITIONS = "visual.pos_embed.weight"
MERGER = "visual.merger"
_MAX_ASPECT_RATIO = 200
_LOW_DETAIL_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionSpec(PatchMergingVisionSpec):
    temporal_patch_size: int
    """An image is repeated as this many frames."""
    min_pixels: int
    """`min_pixels` and `max_pixels` bound the resized image."""
    max_pixels: int
    position_table_size: int = 0
    """Rows of the table, which covers a square; 0 without a table."""
    window_side: int = 0
    """Pixels per side, or 0 without windows."""
    full_attention_layers: tuple[int, ...] = ()
    deepstack_layers: tuple[int, ...] = ()
    """The text model's first layers add features of these layers (Meng et al., 2024)."""
    has_llama_style_layers: bool = False

    @property
    def num_deepstack_layers(self) -> int:
        return len(self.deepstack_layers)

    def mean_attended_patches(self, content: Content) -> float:
        all_patches = VisionSpec.mean_attended_patches(self, content)
        if not self.window_side:
            return all_patches
        full = len({*self.full_attention_layers} & {*range(self.tower_shape.num_layers)}) / self.tower_shape.num_layers
        return full * all_patches + (1 - full) * min(
            all_patches, (self.window_side // self.tower_shape.patch_size) ** 2
        )

    def encoder_cost(self, content: Content) -> int:
        """Each patch merger costs half a layer."""
        mergers = self.num_patches(content) * (1 + len(self.deepstack_layers)) / 2 / self.tower_shape.num_layers
        return VisionSpec.encoder_cost(self, content) + math.ceil(mergers)

    @property
    def uses_mrope(self) -> bool:
        return True

    def token_rows_and_columns(self, content: Content) -> tuple[int, int]:
        return content.height // self.merged_patch_size, content.width // self.merged_patch_size

    def make_layout(
        self, width: int, height: int, *, low_detail: bool = False, has_other_images: bool = False
    ) -> QwenLayout:
        most = min(self.max_pixels, _LOW_DETAIL_TOKENS * self.merged_patch_size**2) if low_detail else self.max_pixels
        return QwenLayout(self, smart_resize(width, height, self.merged_patch_size, min(self.min_pixels, most), most))

    @property
    def encoder_spec(self) -> EncoderSpec:
        up: tuple[str, ...] = ("mlp.fc1",)
        down = "mlp.fc2"
        if self.has_llama_style_layers:
            up, down = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
        elif self.position_table_size:
            up, down = ("mlp.linear_fc1",), "mlp.linear_fc2"
        names = EncoderWeightNames("", "visual.blocks.{}", ("attn.qkv",), "attn.proj", "norm1", up, down, "norm2")
        spec = pre_norm_encoder_spec(self.tower_shape, names)
        if self.has_llama_style_layers:
            spec = replace(spec, has_rms_norms=True, norm_bias=False, gated=True)
        if self.window_side:
            has_window = (index not in self.full_attention_layers for index in range(self.tower_shape.num_layers))
            spec = replace(spec, metadata_groups=tuple(map(int, has_window)))
        return spec

    @property
    def deepstack_merger_names(self) -> list[str]:
        return [f"visual.deepstack_merger_list.{index}" for index in range(len(self.deepstack_layers))]

    @property
    def merger_layer_names(self) -> tuple[str, str, str]:
        """Norm, first linear and last linear in a merger."""
        return ("norm", "linear_fc1", "linear_fc2") if self.position_table_size else ("ln_q", "mlp.0", "mlp.2")

    def parameter_shapes(self, text_size: int) -> ParameterShapes:
        hidden = self.tower_shape.hidden_size
        has_positions = bool(self.position_table_size)
        shapes = self.encoder_spec.parameter_shapes()
        shapes |= patch_convolution_shapes(
            PATCH_EMBEDDING,
            hidden,
            self.tower_shape.patch_size,
            bias=has_positions,
            frames=self.temporal_patch_size,
        )
        if has_positions:
            shapes[POSITIONS] = (self.position_table_size, hidden)
        wide = hidden * self.merge_size**2
        shapes |= self._merger_shapes(MERGER, hidden, text_size)
        for name in self.deepstack_merger_names:
            shapes |= self._merger_shapes(name, wide, text_size)
        return shapes

    def _merger_shapes(self, merger: str, norm_size: int, text_size: int) -> ParameterShapes:
        wide = self.tower_shape.hidden_size * self.merge_size**2
        norm, first, last = (f"{merger}.{name}" for name in self.merger_layer_names)
        is_layer_norm = not self.has_llama_style_layers
        shapes = norm_shapes({norm: norm_size}, NormSpec(1e-6, is_layer_norm=is_layer_norm, bias=is_layer_norm))
        shapes |= linear_shapes([first], wide, wide, bias=True)
        return shapes | linear_shapes([last], text_size, wide, bias=True)


def qwen2_vl_vision_spec(config: VisionConfig) -> QwenVisionSpec:
    """embed_dim is the tower's width, hidden_size the text model's. Raises ModelError."""
    width = config.tower.get("embed_dim") or 1280
    shape = config.tower_shape(hidden=width, inner=0, layers=32, heads=16, patch=14, act="quick_gelu", eps=1e-6)
    ratio = config.tower.get("mlp_ratio") or 4
    shape = replace(shape, hidden_size=width, intermediate_size=int(width * ratio), eps=1e-6)
    return _base_qwen_vision_spec(config, shape)


def qwen2_5_vl_vision_spec(config: VisionConfig) -> QwenVisionSpec:
    """Raises ModelError."""
    shape = config.tower_shape(hidden=3584, inner=3420, layers=32, heads=16, patch=14, act="silu", eps=1e-6)
    full = config.tower.get("fullatt_block_indexes")
    vision = _base_qwen_vision_spec(config, shape)
    window = config.tower.get("window_size") or 112
    if window < vision.merged_patch_size:
        raise config.config_error(
            f"vision_config: window_size: a window of {window} pixels holds no token of {vision.merged_patch_size}"
        )
    full_layers = (7, 15, 23, 31) if full is None else tuple(full)
    return replace(
        vision,
        window_side=window,
        full_attention_layers=full_layers,
        has_llama_style_layers=True,
        tower_shape=replace(shape, eps=1e-6),
    )


def qwen3_vl_vision_spec(config: VisionConfig) -> QwenVisionSpec:
    """Qwen3.5 by default has no deepstack. Raises ModelError."""
    shape = config.tower_shape(
        hidden=1152, inner=4304, layers=27, heads=16, patch=16, act="gelu_pytorch_tanh", eps=1e-6
    )
    vision = _base_qwen_vision_spec(config, replace(shape, eps=1e-6))
    table, deepstack_indexes = (
        config.tower.get("num_position_embeddings") or 2304,
        config.tower.get("deepstack_visual_indexes"),
    )
    deepstack_layers = (
        tuple(deepstack_indexes)
        if deepstack_indexes is not None
        else ()
        if "3_5" in str(config.text_config.get("model_type"))
        else (8, 16, 24)
    )
    if math.isqrt(table) ** 2 != table:
        raise config.config_error(f"vision_config: num_position_embeddings: {table} are no square")
    layers = config.text_config.get("num_hidden_layers")
    if sorted({*deepstack_layers, *range(shape.num_layers)}) != list(range(shape.num_layers)) or list(
        deepstack_layers
    ) != sorted(deepstack_layers):
        raise config.config_error(
            f"vision_config: deepstack_visual_indexes: {list(deepstack_layers)} of {shape.num_layers} layers"
        )
    if isinstance(layers, int) and len(deepstack_layers) >= layers:
        raise config.config_error(
            f"vision_config: deepstack_visual_indexes: {len(deepstack_layers)} for {layers} layers of text"
        )
    return replace(vision, position_table_size=table, deepstack_layers=deepstack_layers)


def _base_qwen_vision_spec(config: VisionConfig, shape: TowerShape) -> QwenVisionSpec:
    config.check_heads(shape)
    out_size, text_size = config.tower.get("out_hidden_size"), config.text_config.get("hidden_size")
    if out_size is not None and isinstance(text_size, int) and out_size != text_size:
        raise config.config_error(
            f"vision_config: out_hidden_size is {out_size}, the text model's hidden_size {text_size}"
        )
    if (size := shape.hidden_size // shape.num_heads) % 4:
        raise config.config_error(f"vision_config: num_heads: heads of {size} cannot be rotated by row and column")
    sizes, preprocessor = config.preprocessor_size(), config.preprocessor
    merge = config.tower.get("spatial_merge_size") or 2
    min_pixels = preprocessor.get("min_pixels") or sizes.get("shortest_edge") or 56 * 56
    max_pixels = preprocessor.get("max_pixels") or sizes.get("longest_edge") or 28 * 28 * 1280
    config.check_preprocessor_sizes({"patch_size": shape.patch_size, "merge_size": merge})
    if max_pixels < (shape.patch_size * merge) ** 2 or min_pixels > max_pixels:
        raise config.config_error(f"size (of preprocessor_config.json): from {min_pixels} to {max_pixels} pixels")
    return QwenVisionSpec(
        tower_shape=shape,
        normalization=config.pixel_normalization(CLIP_MEAN, CLIP_STD),
        resample_filter=config.resample_filter(_BICUBIC),
        image_token_id=config.image_token_id(151655),
        merge_size=merge,
        temporal_patch_size=config.tower.get("temporal_patch_size") or 2,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )


@dataclass(frozen=True, slots=True)
class QwenLayout(ImageLayout):
    vision: QwenVisionSpec
    resized_size: tuple[int, int]

    @property
    def token_run_lengths(self) -> tuple[tuple[int, ...], ...]:
        unit = self.vision.merged_patch_size
        return ((self.resized_size[0] // unit * (self.resized_size[1] // unit),),)

    def placeholder_text(self, spell: TokenSpeller) -> str:
        return spell(self.vision.image_token_id) * self.num_tokens

    def iter_resized_images(self, image: Image.Image) -> Iterator[Content]:
        from PIL import Image

        width, height = self.resized_size
        image = image.resize(self.resized_size, resample=Image.Resampling(self.vision.resample_filter))
        yield Content.from_pixels(height, width, image.tobytes())


def smart_resize(width: int, height: int, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (width, height) as multiples of `multiple`. Raises InvalidImage for narrow images."""
    if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
        raise InvalidImage(
            f"the image has {width} x {height} pixels; one side may be {_MAX_ASPECT_RATIO} times the other"
        )
    high, wide = round(height / multiple) * multiple, round(width / multiple) * multiple
    if high * wide > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        high = max(multiple, math.floor(height / beta / multiple) * multiple)
        wide = max(multiple, math.floor(width / beta / multiple) * multiple)
    elif high * wide < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        high = math.ceil(height * beta / multiple) * multiple
        wide = math.ceil(width * beta / multiple) * multiple
    return wide, high


QWEN2_VL_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen2_vl",),
    text_model_type="qwen2_vl_text",
    read_vision_spec=qwen2_vl_vision_spec,
)
QWEN2_5_VL_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen2_5_vl",),
    text_model_type="qwen2_5_vl_text",
    read_vision_spec=qwen2_5_vl_vision_spec,
)
QWEN3_VL_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen3_vl",),
    text_model_type="qwen3_vl_text",
    read_vision_spec=qwen3_vl_vision_spec,
)
QWEN3_VL_MOE_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen3_vl_moe",),
    text_model_type="qwen3_vl_moe_text",
    read_vision_spec=qwen3_vl_vision_spec,
)
QWEN3_5_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen3_5",),
    text_model_type="qwen3_5_text",
    read_vision_spec=qwen3_vl_vision_spec,
)
QWEN3_5_MOE_WITH_IMAGES = MultimodalFamily(
    model_types=("qwen3_5_moe",),
    text_model_type="qwen3_5_moe_text",
    read_vision_spec=qwen3_vl_vision_spec,
)
