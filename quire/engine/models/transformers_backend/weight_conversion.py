"""Converts tensors by transformers' rules, which may join experts or split linears."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from quire.engine.checkpoint.tensor_headers import text_tensor_name
from quire.engine.common.errors import ModelError
from quire.engine.models.transformers_backend.model_builder import build_model

_NON_TEXT = re.compile(r"(^|[._])(vision|visual|image|img|audio|speech|multi_modal|mm)(_|\.|$)")
TensorStream = Iterator[tuple[str, Tensor]]


@dataclass(slots=True)
class _PendingConversion:
    converter: Any
    num_elements: int
    parts: list[tuple[str, str, Tensor]] = field(default_factory=list)
    """Tuples (stored name, matched pattern, tensor)."""


class _OriginalModel:
    def __init__(self, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
        self._model, self._state = model, state

    def get_parameter(self, name: str) -> Tensor:
        return self._state[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class WeightConversion:
    """Create this before modules are replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        state = model.state_dict()
        self._state_dict: dict[str, Tensor] = state
        self._model = _OriginalModel(model, state)
        self._canonical = _first_names_of_tied_parameters(model)
        unexpected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._unexpected = [re.compile(pattern) for pattern in unexpected]

    def first_name_of_tied_parameter(self, name: str) -> str:
        return self._canonical.get(name, name)

    def convert_weights(self, stream: Iterable[tuple[str, Tensor]]) -> TensorStream:
        """Raises ModelError for tensors that do not fit."""
        yielded, waiting = set[str](), dict[str, _PendingConversion]()
        for stored, tensor in stream:
            for name, weight in self._convert_tensor(stored, tensor, waiting):
                canonical_name = self.first_name_of_tied_parameter(name)
                unused = name not in self._state_dict and any(pattern.search(name) for pattern in self._unexpected)
                if canonical_name not in yielded and not unused:
                    yielded.add(canonical_name)
                    yield canonical_name, weight
        if waiting:
            name = next(iter(waiting))
            raise ModelError(f"model: the weights lack tensors that form {name}")

    def _convert_tensor(
        self, stored: str, tensor: Tensor, waiting: dict[str, _PendingConversion]
    ) -> Iterator[tuple[str, Tensor]]:
        name, pattern = self._rename_and_match_converter(stored)
        if name not in self._state_dict:  # maybe of a multimodal model
            if (text := text_tensor_name(stored)) is None or _NON_TEXT.search(stored):
                return
            name, pattern = self._rename_and_match_converter(text)
        if pattern is None or name not in self._state_dict:
            yield name, tensor
            return
        rule = self._by_pattern[pattern]
        if name not in waiting:
            targets = {name.replace(rule.target_patterns[0], target) for target in rule.target_patterns}
            num_elements = sum(self._state_dict[each].numel() for each in targets if each in self._state_dict)
            waiting[name] = _PendingConversion(copy.deepcopy(rule), num_elements)
        pending = waiting[name]
        pending.parts.append((stored, pattern, tensor))
        if sum(part.numel() for _, _, part in pending.parts) >= pending.num_elements:
            yield from self._run_converter(name, waiting.pop(name))

    def _rename_and_match_converter(self, stored: str) -> tuple[str, str | None]:
        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._state_dict)
        return (stored, None) if name not in self._state_dict and stored in self._state_dict else (name, pattern)

    def _run_converter(self, name: str, pending: _PendingConversion) -> Iterator[tuple[str, Tensor]]:
        for stored, pattern, tensor in sorted(pending.parts, key=lambda part: dot_natural_key(part[0])):
            pending.converter.add_tensor(name, stored, pattern, tensor)
        try:
            converted = pending.converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:
            raise ModelError(f"model: {name}: transformers' rule for it fails: {type(error).__name__}") from error
        for target, tensor in converted.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor


def convert_meta_tensors(config_fields: Mapping[str, Any], stream: Iterable[tuple[str, Tensor]]) -> TensorStream:
    """Drops buffers. Raises ModelError."""
    model = build_model(config_fields, torch.float32)
    buffers = {name for name, _ in model.named_buffers()}
    return ((name, tensor) for name, tensor in WeightConversion(model).convert_weights(stream) if name not in buffers)


def _first_names_of_tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    first: dict[int, str] = {}
    canonical = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical[name] = first.setdefault(id(parameter), name)
    return canonical
