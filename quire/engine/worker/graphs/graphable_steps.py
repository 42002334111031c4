from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.worker.input_batch import InputBatch
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext
from quire.kernels.gpu.prefill_decode_split import join_metadata

ComputeHeadStates = Callable[[Tensor, AttentionMetadata, Tensor, Sequence[Tensor]], Tensor]


class GraphableSteps:
    """Functions that return hidden states append auxiliary hidden states to each row."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        slots: InputBatch,
        aux_layers: Sequence[int] = (),
        compute_head_states: ComputeHeadStates | None = None,
    ) -> None:
        """`compute_head_states` runs after sampling."""
        self._model = model
        self._kv_cache = kv_cache
        self._input_batch = slots
        self._aux_layers = aux_layers
        self._compute_head_states = compute_head_states

    @property
    def hidden_width(self) -> int:
        return self._model.spec.hidden_size * (1 + len(self._aux_layers))

    def compute_decode_hidden(self, rows: Tensor, max_blocks: int) -> Tensor:
        return self._compute_hidden_with_aux(*self._input_batch.graph_decode_inputs(rows, max_blocks))

    def compute_mixed_batch_hidden(self, rows: Tensor, chunks: Tensor, num_decodes: int, max_blocks: int) -> Tensor:
        """The batch has `num_decodes` decode rows, then prefill chunks."""
        return self._compute_hidden_with_aux(*self._make_mixed_inputs(rows, chunks, num_decodes, max_blocks))

    def compute_head_states_after_decode(self, rows: Tensor, hidden: Tensor, max_blocks: int) -> Tensor:
        _, metadata = self._input_batch.graph_decode_inputs(rows, max_blocks, updates_states=False)
        return self._compute_draft_head_states(rows, metadata, hidden)

    def compute_head_states_after_mixed_batch(
        self, rows: Tensor, chunks: Tensor, num_decodes: int, max_blocks: int, hidden: Tensor
    ) -> Tensor:
        _, metadata = self._make_mixed_inputs(rows, chunks, num_decodes, max_blocks, updates_states=False)
        return self._compute_draft_head_states(rows, metadata, hidden)

    def _make_mixed_inputs(
        self, rows: Tensor, chunks: Tensor, num_decodes: int, max_blocks: int, *, updates_states: bool = True
    ) -> tuple[Tensor, AttentionMetadata]:
        slot_rows, adapters = rows[:2], rows[2:]
        ids, decode_metadata = self._input_batch.graph_decode_inputs(
            slot_rows[:, :num_decodes], max_blocks, updates_states=updates_states
        )
        prefill_ids, prefill_metadata = self._input_batch.graph_prefill_inputs(
            slot_rows[:, num_decodes:], chunks, max_blocks, updates_states=updates_states
        )
        linear = LinearContext.from_adapter_slots(adapters[0]) if len(adapters) else NO_ADAPTERS
        return torch.cat((ids, prefill_ids)), join_metadata(decode_metadata, prefill_metadata, linear)

    def _compute_hidden_with_aux(self, token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        every = torch.arange(len(token_ids), device=token_ids.device)
        hidden, aux_hidden = self._model.forward_with_aux(token_ids, metadata, self._kv_cache, every, self._aux_layers)
        return torch.cat((hidden, *aux_hidden), dim=1) if aux_hidden else hidden

    def _compute_draft_head_states(self, rows: Tensor, metadata: AttentionMetadata, side_by_side: Tensor) -> Tensor:
        assert self._compute_head_states is not None
        hidden, *aux_hidden = self.split_hidden(side_by_side)
        return self._compute_head_states(rows[0], metadata, hidden, aux_hidden)

    def split_hidden(self, side_by_side: Tensor) -> list[Tensor]:
        count = 1 + len(self._aux_layers)
        return [side_by_side] if count == 1 else [each.contiguous() for each in side_by_side.chunk(count, dim=1)]
