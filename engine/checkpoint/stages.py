"""Which layers each process computes where a model is divided by layers (pipeline parallelism: Huang et al.,
2019, GPipe).

This module does not import torch, so `quire plan` can use it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from quire.engine.checkpoint.page_groups import PageGroups


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
