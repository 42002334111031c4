"""Chooses layers for pipeline stages (GPipe: Huang et al., 2019), and layers to stream (kernels/streaming)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from quire.engine.checkpoint.kv_cache_groups import KVCacheGroups

STREAMED_LAYER_SLOTS = 2
DEFAULT_LAYER_MEMORY_FRACTION = 0.5


def split_layers_into_stages(num_layers: int, num_stages: int) -> list[range]:
    """Stages may differ by one layer. The last one never gets more, because it also samples. Stages may be empty."""
    boundaries = [-(-num_layers * stage // num_stages) for stage in range(num_stages + 1)]
    return [range(begin, end) for begin, end in pairwise(boundaries)]


def stage_kv_cache_groups(groups: KVCacheGroups, layer_range: range) -> KVCacheGroups:
    """Block ids are the same in all stages."""
    if len(layer_range) == len(groups.group_of_layer):  # one stage; layers that share KV blocks keep their indices
        return groups
    group_of_layer = groups.group_of_layer[layer_range.start : layer_range.stop]
    layer_index_in_block = [group_of_layer[:index].count(group) for index, group in enumerate(group_of_layer)]
    return replace(groups, group_of_layer=group_of_layer, layer_index_in_block=tuple(layer_index_in_block))


def layers_per_block_by_stage(groups: KVCacheGroups, num_stages: int) -> list[int]:
    layers_by_stage = split_layers_into_stages(len(groups.group_of_layer), num_stages)
    return [stage_kv_cache_groups(groups, each).layers_per_block for each in layers_by_stage if each]


def pick_evenly_spaced_layers(num_layers: int, num_picked: int) -> list[int]:
    return [
        layer
        for layer in range(num_layers)
        if (layer + 1) * num_picked // num_layers > layer * num_picked // num_layers
    ]


def min_streamed_layers(layer_bytes: Sequence[int], memory_bytes: int) -> list[int]:
    """Evenly spaces the layers. Raises ValueError if the slots for streamed layers alone do not fit."""
    for count in range(len(layer_bytes) + 1):
        streamed = pick_evenly_spaced_layers(len(layer_bytes), count)
        slot_bytes = STREAMED_LAYER_SLOTS * max((layer_bytes[layer] for layer in streamed), default=0)
        if sum(layer_bytes) - sum(layer_bytes[layer] for layer in streamed) + slot_bytes <= memory_bytes:
            return streamed
    min_bytes = STREAMED_LAYER_SLOTS * max(layer_bytes)
    raise ValueError(
        f"{STREAMED_LAYER_SLOTS} layers have memory at a time, {min_bytes:,} bytes, and {memory_bytes:,} are for all "
        "of them"
    )


def max_streamed_layers(layer_bytes: Sequence[int], offload_bytes: int) -> list[int]:
    """Evenly spaces the layers. Raises ValueError if this saves no device memory."""
    for count in range(len(layer_bytes), STREAMED_LAYER_SLOTS, -1):
        streamed = pick_evenly_spaced_layers(len(layer_bytes), count)
        if sum(layer_bytes[layer] for layer in streamed) <= offload_bytes:
            return streamed
    if len(layer_bytes) <= STREAMED_LAYER_SLOTS:
        raise ValueError(f"the model has {len(layer_bytes)} layers, and {STREAMED_LAYER_SLOTS} have memory in any case")
    min_bytes = sum(
        layer_bytes[layer] for layer in pick_evenly_spaced_layers(len(layer_bytes), STREAMED_LAYER_SLOTS + 1)
    )
    raise ValueError(
        f"{STREAMED_LAYER_SLOTS} layers have memory in any case: only from {min_bytes:,} bytes on is some saved"
    )
