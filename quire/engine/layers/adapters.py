from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.engine.architecture.decoder import EMBED_TOKENS
from quire.engine.common.errors import AdapterError
from quire.engine.layers.shard import LinearSlice
from quire.kernels.backend import AdapterSlotSpec, Backend, Linear, LinearContext, LinearWithLora, LoraDelta


@dataclass(frozen=True, slots=True)
class LoRALayerWeights:
    """They add x @ down.T @ up.T to a module's outputs."""

    down: Tensor
    """[rank, in_features]; for the embedding [rank, vocab]."""
    up: Tensor
    """[out_features, rank], already multiplied by the adapter's scale."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    linears: Mapping[int, Any]
    """Results of pack_one_adapter, keyed by linear index."""
    embedding: tuple[Tensor, Tensor] | None
    """Factors [vocab, rank] and [hidden, rank]."""


@dataclass(frozen=True, slots=True)
class _TargetModuleLocation:
    linear_index: int
    first_output: int
    linear_slice: LinearSlice


class AdapterManager:
    """Any thread may pack adapters. Put adapters into slots between steps."""

    def __init__(
        self, backend: Backend, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.absent_module_prefixes: tuple[str, ...] = ()
        self._backend = backend
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._linears: list[LinearWithLora] = []
        self._targets: dict[str, _TargetModuleLocation] = {}
        self._embeddings: dict[int, tuple[Tensor, Tensor]] = {}

    def add_slots_to_linear(
        self, linear: Linear, parts: Mapping[str, int], in_features: int, cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        sizes = [cuts[name].sliced_sizes(outs, in_features) for name, outs in parts.items()]
        output_sizes, inner = tuple(own for own, _ in sizes), sizes[0][1]
        for name, first in zip(parts, accumulate(output_sizes, initial=0), strict=False):
            self._targets[name] = _TargetModuleLocation(len(self._linears), first, cuts[name])
        slots = AdapterSlotSpec(self._num_slots, inner, output_sizes, self._max_rank, self._dtype, wide, self._device)
        adapted_linear = self._backend.make_linear_with_lora(linear, slots)
        self._linears.append(adapted_linear)
        return adapted_linear

    @property
    def supports_embeddings(self) -> bool:
        """False on GPUs, because embedding deltas wait for the host, which GPU steps must not do."""
        return self._device.type == "cpu"

    def pack_adapter(self, modules: Mapping[str, LoRALayerWeights]) -> PackedAdapter:
        deltas: dict[int, list[LoraDelta]] = {}
        embedding = None
        for name, weights in sorted(modules.items(), key=lambda item: self._target_sort_key(item[0])):
            if f"{name}.".startswith(self.absent_module_prefixes):
                continue
            down, up = weights.down.to(self._dtype), weights.up.to(self._dtype)
            if name == EMBED_TOKENS:
                embedding = (down.t().contiguous(), up)
            else:
                if (target := self._targets.get(name)) is None:  # an embedding model has no head
                    raise AdapterError(f"{name}: the model is served without it")
                delta = (each.contiguous() for each in target.linear_slice.slice_lora(down, up))
                deltas.setdefault(target.linear_index, []).append(LoraDelta(target.first_output, *delta))
        return PackedAdapter(
            {index: self._linears[index].pack_one_adapter(each) for index, each in deltas.items()}, embedding
        )

    def put_adapter(self, slot: int, adapter: PackedAdapter) -> None:
        """Takes effect with the next step."""
        for number, linear in enumerate(self._linears):
            linear.put_adapter(slot, adapter.linears.get(number))
        self._embeddings.pop(slot, None)
        if adapter.embedding is not None:
            self._embeddings[slot] = adapter.embedding

    def add_embedding_deltas(self, x: Tensor, token_ids: Tensor, context: LinearContext) -> Tensor:
        """Adds deltas row by row, so that a row's bits depend on nothing else."""
        if context.adapter_slots is None or not self._embeddings:
            return x
        for row, slot in enumerate(context.adapter_slots.tolist()):
            if slot in self._embeddings:
                down, up = self._embeddings[slot]
                x[row] = (x[row].float() + up.float() @ down[token_ids[row]].float()).to(x.dtype)
        return x

    def _target_sort_key(self, name: str) -> tuple[int, int]:
        target = self._targets.get(name)
        return (-1, 0) if target is None else (target.linear_index, target.first_output)
