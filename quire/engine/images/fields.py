"""The fields that are read of a model's files about images, with their types and bounds. A field may be null, which
means the same as not being there."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

Width = Annotated[int, Meta(ge=1, le=2**20)]
Side = Annotated[int, Meta(ge=1, le=2**14)]
"""In pixels."""
Area = Annotated[int, Meta(ge=1, le=2**28)]
"""The same, or a side, where it is one of several meanings of a name."""
_Text = Annotated[str, Meta(max_length=256)]
_Colours = Annotated[list[Annotated[float, Meta(ge=-1e3, le=1e3)]], Meta(min_length=3, max_length=3)]
_Layers = Annotated[int, Meta(ge=1, le=4096)]
_Layer = Annotated[int, Meta(ge=-4096, le=4096)]
_Patch = Annotated[int, Meta(ge=1, le=1024)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_Few = Annotated[int, Meta(ge=1, le=64)]
_Pairs = Annotated[list[Annotated[list[Side], Meta(min_length=2, max_length=2)]], Meta(min_length=1, max_length=1024)]


class VisionFields(TypedDict, total=False):
    """What is read of vision_config. Without a value transformers' default holds."""

    model_type: _Text | None
    hidden_size: Width | None
    embed_dim: Width | None
    intermediate_size: Width | None
    mlp_ratio: Annotated[float, Meta(gt=0, le=64)] | None
    num_hidden_layers: _Layers | None
    depth: _Layers | None
    num_attention_heads: Width | None
    num_heads: Width | None
    num_channels: int | None
    in_channels: int | None
    in_chans: int | None
    image_size: Side | Annotated[list[Side], Meta(min_length=2, max_length=2)] | None
    patch_size: _Patch | Annotated[list[_Patch], Meta(min_length=2, max_length=2)] | None
    hidden_act: _Text | None
    layer_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None
    spatial_merge_size: _Few | None
    temporal_patch_size: _Few | None
    out_hidden_size: Width | None
    window_size: Side | None
    fullatt_block_indexes: Annotated[list[_Layer], Meta(max_length=4096)] | None
    deepstack_visual_indexes: Annotated[list[_Layer], Meta(max_length=64)] | None
    num_position_embeddings: Annotated[int, Meta(ge=1, le=2**20)] | None
    rope_theta: Annotated[float, Meta(ge=1, le=1e15)] | None
    rope_parameters: dict[str, Any] | None
    attention_bias: bool | None
    use_qk_norm: bool | None
    use_mean_pooling: bool | None
    norm_type: _Text | None
    head_dim: Width | None
    num_key_value_heads: Width | None
    hidden_activation: _Text | None
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None
    pooling_kernel_size: _Few | None
    position_embedding_size: Annotated[int, Meta(ge=1, le=2**20)] | None
    use_clipped_linears: bool | None
    standardize: bool | None
    vision_use_head: bool | None
    num_patches: Annotated[int, Meta(ge=1, le=2**16)] | None


class OuterFields(TypedDict, total=False):
    """What is read beside it."""

    scale_factor: _Few | None
    image_token_id: _TokenId | None
    image_token_index: _TokenId | None
    boi_token_index: _TokenId | None
    eoi_token_index: _TokenId | None
    boi_token_id: _TokenId | None
    eoi_token_id: _TokenId | None
    mm_tokens_per_image: Annotated[int, Meta(ge=1, le=2**16)] | None
    vision_feature_layer: _Layer | list[_Layer] | None
    vision_feature_select_strategy: _Text | None
    projector_hidden_act: _Text | None
    multimodal_projector_bias: bool | None
    image_grid_pinpoints: _Pairs | None
    vision_aspect_ratio: _Text | None
    spatial_merge_size: _Few | None
    projection_dim: Width | None
    projector_hidden_size: Width | None
    projector_bias: bool | None
    projector_use_layernorm: bool | None
    downsample_factor: _Few | None
    downsample_ratio: Annotated[float, Meta(gt=0, le=1)] | None


class Sizes(TypedDict, total=False):
    longest_edge: Area | None
    shortest_edge: Area | None
    height: Side | None
    width: Side | None


class PreparingFields(TypedDict, total=False):
    """What is read of preprocessor_config.json, or of image_processor in processor_config.json."""

    do_image_splitting: bool | None
    do_normalize: bool | None
    do_rescale: bool | None
    do_resize: bool | None
    do_center_crop: bool | None
    do_pad: bool | None
    do_pan_and_scan: bool | None
    crop_size: Side | Sizes | None
    image_mean: _Colours | None
    image_std: _Colours | None
    max_image_size: Sizes | None
    resample: Annotated[int, Meta(ge=0, le=5)] | None
    rescale_factor: Annotated[float, Meta(gt=0, le=1)] | None
    size: Side | Sizes | None
    min_pixels: Area | None
    max_pixels: Area | None
    patch_size: _Patch | Sizes | None
    temporal_patch_size: _Few | None
    merge_size: _Few | None
    max_soft_tokens: Annotated[int, Meta(ge=1, le=2**16)] | None
    pooling_kernel_size: _Few | None
    image_grid_pinpoints: _Pairs | None
    downsample_factor: _Few | None
    encoder_patch_size: _Patch | None
    tile_size: Side | None
    min_tiles: _Few | None
    max_tiles: _Few | None
    use_thumbnail: bool | None
    min_image_tokens: Annotated[int, Meta(ge=1, le=2**14)] | None
    max_image_tokens: Annotated[int, Meta(ge=1, le=2**14)] | None
    max_pixels_tolerance: Annotated[float, Meta(ge=1, le=64)] | None
    min_patches: Annotated[int, Meta(ge=1, le=1024)] | None
    max_patches: Annotated[int, Meta(ge=1, le=1024)] | None


class ProcessorFields(TypedDict, total=False):
    """What is read of processor_config.json."""

    image_processor: dict[str, Any] | None
