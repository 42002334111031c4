"""Types and bounds of quantization_config."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.families.base.schema.config_objects import ShortText, Width

_ModuleNames = Annotated[list[ShortText], Meta(max_length=2**14)]


class WeightQuantizationArgs(TypedDict, total=False):
    num_bits: Annotated[int, Meta(ge=1, le=64)] | None
    type: ShortText | None
    strategy: ShortText | None
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None
    symmetric: bool | None
    actorder: bool | ShortText | None
    block_structure: Annotated[list[Width], Meta(min_length=2, max_length=2)] | ShortText | None


class QuantizationGroup(TypedDict, total=False):
    """Kernels have their own rules for activations, so those in files are ignored."""

    targets: _ModuleNames | None
    weights: WeightQuantizationArgs | None
    format: ShortText | None


class ModelOptLayer(TypedDict, total=False):
    quant_algo: ShortText | None
    group_size: Annotated[int, Meta(ge=0, le=2**24)] | None


class QuantizationConfig(TypedDict, total=False):
    quant_method: ShortText | None
    fmt: ShortText | None
    activations: str | None
    """CPUs compute with GGUF weights in this dtype. Quire sets this field; files do not have it."""
    bits: Annotated[float, Meta(ge=0, le=64)] | None
    w_bit: Annotated[float, Meta(ge=0, le=64)] | None
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None
    q_group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None
    desc_act: bool | None
    checkpoint_format: ShortText | None
    dynamic: dict[str, Any] | None
    version: ShortText | None
    zero_point: bool | None
    load_in_4bit: bool | None
    load_in_8bit: bool | None
    llm_int8_skip_modules: _ModuleNames | None
    modules_to_not_convert: _ModuleNames | None
    ignored_layers: _ModuleNames | None
    ignore: _ModuleNames | None
    format: ShortText | None
    config_groups: dict[ShortText, QuantizationGroup] | None
    weight_block_size: Annotated[list[Width], Meta(min_length=2, max_length=2)] | None
    kv_cache_scheme: dict[str, Any] | ShortText | None
    quant_algo: ShortText | None
    kv_cache_quant_algo: ShortText | None
    exclude_modules: _ModuleNames | None
    quantized_layers: Annotated[dict[ShortText, ModelOptLayer], Meta(max_length=2**18)] | None
