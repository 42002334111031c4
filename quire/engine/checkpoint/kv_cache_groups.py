"""Groups layers that share a block table, so that sliding-window layers keep only their window.

All layers of a group have the same window, and all groups have equally many layers, so any group can use any block
(blocks: Kwon et al., 2023; equal groups: vLLM).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.architecture.kv_cache_spec import LayerKVCacheSpecs, SharedKVSpec, max_blocks_in_window
from quire.engine.checkpoint.config_reader import extract_text_config
from quire.engine.checkpoint.family_spec import build_decoder_spec
from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.errors import refuse_setting_if
from quire.engine.families import find_decoder_family
from quire.engine.families.base.layer_types import unserved_layer_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.rope_fields import rope_depends_on_context

_MAX_GROUPS = 8
"""Every step sends a block table per group."""


@dataclass(frozen=True, slots=True)
class KVCacheGroups:
    windows: tuple[int | None, ...]
    """Per group: tokens that a token sees, itself included; None for all."""
    group_of_layer: tuple[int, ...]
    layer_index_in_block: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def layers_per_block(self) -> int:
        return max(self.layer_index_in_block) + 1


def single_kv_cache_group(num_layers: int, window: int | None = None) -> KVCacheGroups:
    return KVCacheGroups((window,), (0,) * num_layers, tuple(range(num_layers)))


def setting_requiring_full_kv(config: EngineConfig) -> str | None:
    """Return a setting that makes sliding-window layers keep all tokens."""
    for key in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier"):  # tiers keep blocks of all layers
        if getattr(config, key):
            return key
    return "speculative_config" if config.has_draft_weights else None  # drafters use the same block ids


def apply_context_settings(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Applies only settings that change the generated tokens."""
    model = _limit_context_to_window(model, config)
    hf_config = model.transformers_config
    text_fields = model.raw if hf_config is None else extract_text_config(hf_config)
    if (
        rope_context_tokens := resolve_rope_context(
            config, model.max_position, text_fields, by_transformers=hf_config is not None
        )
    ) is None:
        return model
    return replace(model, rope_context=rope_context_tokens, max_position=min(model.max_position, rope_context_tokens))


def resolve_rope_context(
    config: EngineConfig, max_position: int, text_fields: Mapping[str, Any], *, by_transformers: bool
) -> int | None:
    """None if RoPE does not depend on the context length. Raises ConfigError if rope_context has no effect."""
    family = find_decoder_family(text_fields.get("model_type"))
    has_longrope = family is not None and family.has_longrope
    if not rope_depends_on_context(text_fields, by_transformers=by_transformers, has_longrope=has_longrope):
        refuse_setting_if(
            "rope_context", config.rope_context is not None and "the model's rotations depend on no context"
        )
        return None
    # The context that memory allows may differ after a restart, which would change tokens.
    return config.rope_context or config.max_model_len or max_position


def _limit_context_to_window(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    if not config.disable_sliding_window:
        return model
    windows = _sliding_windows(model)
    return replace(model, max_position=min([model.max_position, *windows]))


def _sliding_windows(model: ModelConfig) -> list[int]:
    if model.transformers_config is not None:
        text_fields = extract_text_config(model.transformers_config)
        return [each for each in unserved_layer_windows(text_fields, model.num_layers) if each]
    return [
        each.window
        for each in build_decoder_spec(model).kv_cache_specs
        if each.window and not isinstance(each, SharedKVSpec)
    ]


def max_draft_tokens_per_step(config: EngineConfig) -> int:
    return (config.speculative_config or SpeculativeConfig(method="grammar")).max_draft_tokens


def build_kv_cache_groups(
    layer_specs: Sequence[LayerKVCacheSpecs], max_context: int, block_size: int, *, keep_all_tokens: bool = False
) -> KVCacheGroups:
    """Choose the layers per block that minimize the memory of `max_context` tokens.

    One group keeps all tokens if several groups would save nothing, or if layers keep different states, because a block
    then could not serve every layer.
    """
    kv_source_layers = [
        next((each.layer for each in layer if isinstance(each, SharedKVSpec)), None) for layer in layer_specs
    ]
    if any(source is not None for source in kv_source_layers):
        kv_owning_layers = [
            layer for layer, source in zip(layer_specs, kv_source_layers, strict=True) if source is None
        ]
        return _add_kv_sharing_layers(
            build_kv_cache_groups(kv_owning_layers, max_context, block_size, keep_all_tokens=keep_all_tokens),
            kv_source_layers,
        )
    keep_all_tokens = (
        keep_all_tokens or len({tuple(each.without_window() for each in layer) for layer in layer_specs}) > 1
    )
    windows = [layer[0].window if len(layer) == 1 else None for layer in layer_specs]
    effective_windows = [
        None if window is None or window >= max_context or keep_all_tokens else window for window in windows
    ]
    layers_by_window = Counter(effective_windows)
    if len(layers_by_window) == 1:
        return single_kv_cache_group(len(effective_windows), effective_windows[0])
    layers_per_block = _choose_layers_per_block(layers_by_window, -(-max_context // block_size), block_size)
    if layers_per_block is None:
        return single_kv_cache_group(len(effective_windows))
    return _assign_layers_to_groups(effective_windows, layers_by_window, layers_per_block)


def _choose_layers_per_block(layers_by_window: Counter[int | None], max_blocks: int, block_size: int) -> int | None:
    """Return the layers per block that need the least memory, preferring more layers, or None if one group needs as
    little.
    """
    lowest_cost, layers_per_block = layers_by_window.total() * max_blocks, None
    for size in range(1, max(layers_by_window.values()) + 1):
        groups = {window: -(-count // size) for window, count in layers_by_window.items()}
        cost = size * sum(
            count * max_blocks_in_window(window, 1, max_blocks, block_size) for window, count in groups.items()
        )
        is_lower = cost < lowest_cost or (layers_per_block is not None and cost == lowest_cost)
        if sum(groups.values()) <= _MAX_GROUPS and is_lower:
            lowest_cost, layers_per_block = cost, size
    return layers_per_block


def _add_kv_sharing_layers(groups: KVCacheGroups, kv_source_layers: Sequence[int | None]) -> KVCacheGroups:
    """`kv_source_layers` has the layer whose KV blocks each layer reads, or None for its own."""
    group_of_layer = list[int]()
    layer_index_in_block = list[int]()
    owning_index = 0
    for source in kv_source_layers:
        location = (
            (groups.group_of_layer[owning_index], groups.layer_index_in_block[owning_index])
            if source is None
            else (group_of_layer[source], layer_index_in_block[source])
        )
        group_of_layer.append(location[0])
        layer_index_in_block.append(location[1])
        owning_index += source is None
    return KVCacheGroups(groups.windows, tuple(group_of_layer), tuple(layer_index_in_block))


def _assign_layers_to_groups(
    effective_windows: Sequence[int | None], layers_by_window: Counter[int | None], layers_per_block: int
) -> KVCacheGroups:
    windows = list[int | None]()
    first_group_by_window = dict[int | None, int]()
    num_assigned = Counter[int | None]()
    for window, count in layers_by_window.items():
        first_group_by_window[window] = len(windows)
        windows += [window] * -(-count // layers_per_block)
    group_of_layer, layer_index_in_block = [], []
    for window in effective_windows:  # round-robin, so that pipeline stages get equally many layers of each group
        num_groups = -(-layers_by_window[window] // layers_per_block)
        group_of_layer.append(first_group_by_window[window] + num_assigned[window] % num_groups)
        layer_index_in_block.append(num_assigned[window] // num_groups)
        num_assigned[window] += 1
    return KVCacheGroups(tuple(windows), tuple(group_of_layer), tuple(layer_index_in_block))


@dataclass(frozen=True, slots=True)
class KVBlockNeeds:
    windows: tuple[int | None, ...]
    block_size: int
    max_chunk_tokens: int

    def max_blocks(self, tokens: int, cached_blocks: int = 0) -> int:
        """Returns the most blocks that all groups need at once, without each group's first `cached_blocks`."""
        new_blocks = -(-tokens // self.block_size) - cached_blocks
        return sum(
            max_blocks_in_window(window, self.max_chunk_tokens, new_blocks, self.block_size) for window in self.windows
        )

    def max_context_tokens(self, available_blocks: int, max_tokens: int) -> int:
        low, high = 0, -(-max_tokens // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_blocks(middle * self.block_size) <= available_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, max_tokens)

    def first_visible_block(self, window: int, position: int) -> int:
        return max(position - window + 1, 0) // self.block_size
