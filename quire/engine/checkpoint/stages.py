"""Which layers each process computes where a model is divided by layers (pipeline parallelism: Huang et al.,
2019, GPipe), and which of these are streamed where its weights are larger than the memory (kernels/streaming).

This module does not import torch, so `quire plan` can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from quire.engine.checkpoint.page_groups import PageGroups

STREAM_SLOTS = 2
"""Streamed layers that have memory at a time: one that is multiplied, and the next one."""
FREE_FOR_LAYERS = 0.5
"""Of the memory that is free once they are on a disk, what layers get where nothing is said."""


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, the first stage's first: of equal numbers where that is possible, else the first stages
    have one more, for the last one has the head and samples. With more stages than layers some have none."""
    ends = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def groups_of_stage(groups: PageGroups, layers: range) -> PageGroups:
    """The groups as a stage of these layers has them: a page has the numbers that it has in all stages, and in each the
    keys and values of the stage's own layers."""
    if len(layers) == len(groups.group_of):  # where layers may share a place
        return groups
    group_of = groups.group_of[layers.start : layers.stop]
    place_of = [group_of[:index].count(group) for index, group in enumerate(group_of)]
    return replace(groups, group_of=group_of, place_of=tuple(place_of))


def places_of_stages(groups: PageGroups, stages: int) -> list[int]:
    """Layers of a page, by stage, of those that have layers."""
    layers = stage_layers(len(groups.group_of), stages)
    return [groups_of_stage(groups, each).places for each in layers if each]


def spread(layers: int, streamed: int) -> list[int]:
    """So many of the layers, at even distances: while those between them are computed, the next ones come."""
    return [layer for layer in range(layers) if (layer + 1) * streamed // layers > layer * streamed // layers]


def most_kept(sizes: Sequence[int], memory: int) -> list[int]:
    """The fewest layers that must be streamed for all others and the slots to take so many bytes; sizes: of each layer.
    Raises ValueError where the slots alone take more."""
    for count in range(len(sizes) + 1):
        streamed = spread(len(sizes), count)
        slots = STREAM_SLOTS * max((sizes[layer] for layer in streamed), default=0)
        if sum(sizes) - sum(sizes[layer] for layer in streamed) + slots <= memory:
            return streamed
    least = STREAM_SLOTS * max(sizes)
    raise ValueError(
        f"{STREAM_SLOTS} layers have memory at a time, {least:,} bytes, and {memory:,} are for all of them"
    )


def most_streamed(sizes: Sequence[int], elsewhere: int) -> list[int]:
    """The most layers that take at most so many bytes elsewhere. Raises ValueError where that saves no memory."""
    for count in range(len(sizes), STREAM_SLOTS, -1):
        streamed = spread(len(sizes), count)
        if sum(sizes[layer] for layer in streamed) <= elsewhere:
            return streamed
    if len(sizes) <= STREAM_SLOTS:
        raise ValueError(f"the model has {len(sizes)} layers, and {STREAM_SLOTS} have memory in any case")
    least = sum(sizes[layer] for layer in spread(len(sizes), STREAM_SLOTS + 1))
    raise ValueError(f"{STREAM_SLOTS} layers have memory in any case: only from {least:,} bytes on is some saved")
