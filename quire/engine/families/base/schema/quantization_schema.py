"""What Quire reads of quantization_config: every field, its type and its bounds, as
engine/families/base/schema/config_schema.py has all others. How weights are stored engine/checkpoint/quantization.py
makes of it."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.families.base.schema.config_objects import ShortText, Width

_ModuleNames = Annotated[list[ShortText], Meta(max_length=2**14)]


class WeightQuantizationArgs(TypedDict, total=False):
    """How compressed-tensors stores the weights of a group of linears."""

    num_bits: Annotated[int, Meta(ge=1, le=64)] | None
    type: ShortText | None
    strategy: ShortText | None
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None
    symmetric: bool | None
    actorder: bool | ShortText | None
    block_structure: Annotated[list[Width], Meta(min_length=2, max_length=2)] | ShortText | None


class QuantizationGroup(TypedDict, total=False):
    """Linears that compressed-tensors stores alike. Their activations are rounded as the kernels do it."""

    targets: _ModuleNames | None
    weights: WeightQuantizationArgs | None
    format: ShortText | None


class QuantizationConfig(TypedDict, total=False):
    """quantization_config: how weights are stored; see `engine/checkpoint/quantization.py`."""

    quant_method: ShortText | None
    fmt: ShortText | None
    activations: str | None
    """In GGUF's, ours: what a CPU computes in (engine/checkpoint/config_reader.py)."""
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
    kv_cache_scheme: dict[str, Any] | None
