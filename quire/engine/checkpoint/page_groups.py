"""Which layers share a page table, and how many pages a sequence holds: layers with a sliding window need only the keys
of their window.

A page holds block_size tokens in the layers of one group, which all have the same window; every group has as many
layers, so that any page serves any of them. Kwon et al. (2023) introduce pages; vLLM divides layers into groups of
equal size too. This module does not import torch, so `quire plan` can use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.engine.architecture.kv_cache_spec import LayerStates, PagedState, SharedState
from quire.engine.checkpoint.config_reader import text_config
from quire.engine.checkpoint.family_spec import family_decoder_spec
from quire.engine.config import EngineConfig, SpeculativeConfig
from quire.engine.errors import refuse_setting_if
from quire.engine.families import find_family
from quire.engine.families.base.layer_types import layer_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.ropes import chosen_by_context
from quire.engine.families.base.schema.config_schema import LONGROPE

_MOST_GROUPS = 8
"""Each has a page table, which every step carries."""


@dataclass(frozen=True, slots=True)
class PageGroups:
    windows: tuple[int | None, ...]
    """By group: tokens that a token sees in its layers, itself included; None: all. Pages outside are given back."""
    group_of: tuple[int, ...]
    """By layer: its group,"""
    place_of: tuple[int, ...]
    """and its place among the layers of a page."""

    @property
    def count(self) -> int:
        return len(self.windows)

    @property
    def places(self) -> int:
        """Layers of a page; a group may have fewer."""
        return max(self.place_of) + 1


def one_group(layers: int, window: int | None = None) -> PageGroups:
    """A page for all layers."""
    return PageGroups((window,), (0,) * layers, tuple(range(layers)))


def keeps_all(config: EngineConfig) -> str | None:
    """The setting for which layers with a window keep all tokens too; None: no setting asks for it."""
    for key in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier"):  # which keep pages of all layers
        if getattr(config, key):
            return key
    return "speculative_config" if config.has_draft_weights else None  # what drafts has pages of the same numbers


def as_configured(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model with the context that is asked for, so far as it decides more than how much is kept."""
    model = _without_windows(model, config)
    decides = context_decides(model.model_type, model.rope, model.given)
    if (context := rope_context(config, model.max_position, decides=decides)) is None:
        return model
    return replace(model, rope_context=context, max_position=min(model.max_position, context))


def context_decides(model_type: str, rope: Mapping[str, Any], given: Mapping[str, Any] | None) -> bool:
    """Whether the longest context decides a model's rotations. `given`: its config.json where transformers' class
    computes it, which reads that itself."""
    if given is not None:
        return chosen_by_context(given)
    family = find_family(model_type)
    return family is not None and family.has_longrope and (rope.get("rope_type") or rope.get("type")) in LONGROPE


def rope_context(config: EngineConfig, max_position: int, *, decides: bool) -> int | None:
    """The context by which a model of so many positions rotates; None where none `decides`. Raises ConfigError for one
    that is asked for then."""
    if not decides:
        refuse_setting_if(
            "rope_context", config.rope_context is not None and "the model's rotations depend on no context"
        )
        return None
    # Not the context that the memory allows: tokens would depend on it, and change when an engine is built anew.
    return config.rope_context or config.max_model_len or max_position


def _without_windows(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model, whose context ends where its narrowest window does if the configuration asks for that: up to there
    every layer sees all tokens."""
    if not config.disable_sliding_window:
        return model
    windows = _layer_windows(model)
    return replace(model, max_position=min([model.max_position, *windows]))


def _layer_windows(model: ModelConfig) -> list[int]:
    """Of the layers that have one."""
    if model.given is not None:
        return [each for each in layer_windows(text_config(model.given), model.num_layers) if each]
    return [
        each.window
        for each in family_decoder_spec(model).kv_cache_specs
        if isinstance(each, PagedState) and each.window
    ]


def most_drafts(config: EngineConfig) -> int:
    """Of one sequence in a step."""
    speculative = config.speculative_config or SpeculativeConfig(method="grammar")
    return 0 if speculative.method == "none" else speculative.num_speculative_tokens


def page_groups(layers: Sequence[LayerStates], longest: int, block_size: int, *, keep_all: bool = False) -> PageGroups:
    """The groups of layers that keep these states, for contexts of up to `longest` tokens: so many layers to a page
    that the longest context takes least memory. One group that keeps all tokens where nothing would be saved, where
    it is asked for (`keep_all`), or where some layers keep more of a token than others, or another kind of state, so
    that not any page would serve any of them. A layer that reads another's pages is where that one is."""
    sources = [next((each.layer for each in layer if isinstance(each, SharedState)), None) for layer in layers]
    if any(source is not None for source in sources):
        own = [layer for layer, source in zip(layers, sources, strict=True) if source is None]
        return _with_readers(page_groups(own, longest, block_size, keep_all=keep_all), sources)
    keep_all = keep_all or len({tuple(replace(each, window=None) for each in layer) for layer in layers}) > 1
    windows = [layer[0].window if len(layer) == 1 else None for layer in layers]
    seen = [None if window is None or window >= longest or keep_all else window for window in windows]
    kinds = Counter(seen)
    if len(kinds) == 1:
        return one_group(len(seen), seen[0])
    pages = -(-longest // block_size)
    least, places = len(seen) * pages, 0
    for size in range(1, max(kinds.values()) + 1):
        groups = {window: -(-count // size) for window, count in kinds.items()}
        held = size * sum(count * _spanned(window, 1, pages, block_size) for window, count in groups.items())
        if sum(groups.values()) <= _MOST_GROUPS and (held < least or (places and held == least)):
            least, places = held, size
    return _grouped(seen, kinds, places) if places else one_group(len(seen))


def _with_readers(groups: PageGroups, sources: Sequence[int | None]) -> PageGroups:
    """With layers, among those of `groups`, that read others' pages, whose numbers `sources` gives."""
    group_of = list[int]()
    place_of = list[int]()
    own = 0
    for source in sources:
        where = (groups.group_of[own], groups.place_of[own]) if source is None else (group_of[source], place_of[source])
        group_of.append(where[0])
        place_of.append(where[1])
        own += source is None
    return PageGroups(groups.windows, tuple(group_of), tuple(place_of))


def _grouped(seen: Sequence[int | None], kinds: Counter[int | None], places: int) -> PageGroups:
    windows = list[int | None]()
    first = dict[int | None, int]()
    met = Counter[int | None]()
    for window, count in kinds.items():
        first[window] = len(windows)
        windows += [window] * -(-count // places)
    group_of, place_of = [], []
    for window in seen:  # in turn, so that each stage of a pipeline has as many layers of every group
        groups = -(-kinds[window] // places)
        group_of.append(first[window] + met[window] % groups)
        place_of.append(met[window] // groups)
        met[window] += 1
    return PageGroups(tuple(windows), tuple(group_of), tuple(place_of))


def _spanned(window: int | None, at_once: int, pages: int, block_size: int) -> int:
    """Most pages of a group that a sequence of `pages` pages holds at one time."""
    if window is None:
        return pages
    return min(pages, (window + at_once + block_size - 3) // block_size + 1)


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """How many pages a sequence holds, where a step computes up to `at_once` of its tokens."""

    windows: tuple[int | None, ...]
    """By group, as PageGroups has them."""
    block_size: int
    at_once: int

    def most(self, tokens: int, cached: int = 0) -> int:
        """Pages that a sequence of so many tokens may hold at one time, of all groups, those of its first `cached`
        blocks not counted."""
        new = -(-tokens // self.block_size) - cached
        return sum(_spanned(window, self.at_once, new, self.block_size) for window in self.windows)

    def longest(self, pages: int, limit: int) -> int:
        """Tokens of the longest sequence that so many pages allow for, but no more than `limit`."""
        least, most = 0, -(-limit // self.block_size)
        while least < most:
            middle = (least + most + 1) // 2
            if self.most(middle * self.block_size) <= pages:
                least = middle
            else:
                most = middle - 1
        return min(least * self.block_size, limit)

    def first_seen(self, window: int, position: int) -> int:
        """The first block that the token at a position sees through a window."""
        return max(position - window + 1, 0) // self.block_size
