"""Types and bounds of image fields. null means a missing field."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

LayerWidth = Annotated[int, Meta(ge=1, le=2**20)]
PixelSide = Annotated[int, Meta(ge=1, le=2**14)]
PixelArea = Annotated[int, Meta(ge=1, le=2**28)]
_ShortText = Annotated[str, Meta(max_length=256)]
_RGBValues = Annotated[list[Annotated[float, Meta(ge=-1e3, le=1e3)]], Meta(min_length=3, max_length=3)]
_LayerCount = Annotated[int, Meta(ge=1, le=4096)]
_LayerIndex = Annotated[int, Meta(ge=-4096, le=4096)]
_PatchSide = Annotated[int, Meta(ge=1, le=1024)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_SmallCount = Annotated[int, Meta(ge=1, le=64)]
_SizePairs = Annotated[
    list[Annotated[list[PixelSide], Meta(min_length=2, max_length=2)]], Meta(min_length=1, max_length=1024)
]


class VisionConfigFields(TypedDict, total=False):
    """Missing fields have transformers' defaults."""

    model_type: _ShortText | None
    hidden_size: LayerWidth | None
    embed_dim: LayerWidth | None
    intermediate_size: LayerWidth | None
    mlp_ratio: Annotated[float, Meta(gt=0, le=64)] | None
    num_hidden_layers: _LayerCount | None
    depth: _LayerCount | None
    num_attention_heads: LayerWidth | None
    num_heads: LayerWidth | None
    num_channels: int | None
    in_channels: int | None
    in_chans: int | None
    image_size: PixelSide | Annotated[list[PixelSide], Meta(min_length=2, max_length=2)] | None
    patch_size: _PatchSide | Annotated[list[_PatchSide], Meta(min_length=2, max_length=2)] | None
    hidden_act: _ShortText | None
    layer_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None
    spatial_merge_size: _SmallCount | None
    temporal_patch_size: _SmallCount | None
    out_hidden_size: LayerWidth | None
    window_size: PixelSide | None
    fullatt_block_indexes: Annotated[list[_LayerIndex], Meta(max_length=4096)] | None
    deepstack_visual_indexes: Annotated[list[_LayerIndex], Meta(max_length=64)] | None
    num_position_embeddings: Annotated[int, Meta(ge=1, le=2**20)] | None
    rope_theta: Annotated[float, Meta(ge=1, le=1e15)] | None
    rope_parameters: dict[str, Any] | None
    attention_bias: bool | None
    use_qk_norm: bool | None
    use_mean_pooling: bool | None
    norm_type: _ShortText | None
    head_dim: LayerWidth | None
    num_key_value_heads: LayerWidth | None
    hidden_activation: _ShortText | None
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None
    pooling_kernel_size: _SmallCount | None
    position_embedding_size: Annotated[int, Meta(ge=1, le=2**20)] | None
    use_clipped_linears: bool | None
    standardize: bool | None
    vision_use_head: bool | None
    num_patches: Annotated[int, Meta(ge=1, le=2**16)] | None


class ModelConfigFields(TypedDict, total=False):
    scale_factor: _SmallCount | None
    image_token_id: _TokenId | None
    image_token_index: _TokenId | None
    boi_token_index: _TokenId | None
    eoi_token_index: _TokenId | None
    boi_token_id: _TokenId | None
    eoi_token_id: _TokenId | None
    mm_tokens_per_image: Annotated[int, Meta(ge=1, le=2**16)] | None
    vision_feature_layer: _LayerIndex | list[_LayerIndex] | None
    vision_feature_select_strategy: _ShortText | None
    projector_hidden_act: _ShortText | None
    multimodal_projector_bias: bool | None
    image_grid_pinpoints: _SizePairs | None
    vision_aspect_ratio: _ShortText | None
    spatial_merge_size: _SmallCount | None
    projection_dim: LayerWidth | None
    projector_hidden_size: LayerWidth | None
    projector_bias: bool | None
    projector_use_layernorm: bool | None
    downsample_factor: _SmallCount | None
    downsample_ratio: Annotated[float, Meta(gt=0, le=1)] | None


class SizeFields(TypedDict, total=False):
    longest_edge: PixelArea | None
    shortest_edge: PixelArea | None
    height: PixelSide | None
    width: PixelSide | None


class PreprocessorFields(TypedDict, total=False):
    """From preprocessor_config.json, or image_processor in processor_config.json."""

    do_image_splitting: bool | None
    do_normalize: bool | None
    do_rescale: bool | None
    do_resize: bool | None
    do_center_crop: bool | None
    do_pad: bool | None
    do_pan_and_scan: bool | None
    crop_size: PixelSide | SizeFields | None
    image_mean: _RGBValues | None
    image_std: _RGBValues | None
    max_image_size: SizeFields | None
    resample: Annotated[int, Meta(ge=0, le=5)] | None
    rescale_factor: Annotated[float, Meta(gt=0, le=1)] | None
    size: PixelSide | SizeFields | None
    min_pixels: PixelArea | None
    max_pixels: PixelArea | None
    patch_size: _PatchSide | SizeFields | None
    temporal_patch_size: _SmallCount | None
    merge_size: _SmallCount | None
    max_soft_tokens: Annotated[int, Meta(ge=1, le=2**16)] | None
    pooling_kernel_size: _SmallCount | None
    image_grid_pinpoints: _SizePairs | None
    downsample_factor: _SmallCount | None
    encoder_patch_size: _PatchSide | None
    tile_size: PixelSide | None
    min_tiles: _SmallCount | None
    max_tiles: _SmallCount | None
    use_thumbnail: bool | None
    min_image_tokens: Annotated[int, Meta(ge=1, le=2**14)] | None
    max_image_tokens: Annotated[int, Meta(ge=1, le=2**14)] | None
    max_pixels_tolerance: Annotated[float, Meta(ge=1, le=64)] | None
    min_patches: Annotated[int, Meta(ge=1, le=1024)] | None
    max_patches: Annotated[int, Meta(ge=1, le=1024)] | None


class ProcessorFields(TypedDict, total=False):
    image_processor: dict[str, Any] | None
