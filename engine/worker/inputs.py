"""From a Batch to tensors. Slots are the device's memory of sequences: token ids, page tables, sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.types import Admission, Batch, Row
from kernels.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One step's tensors: T tokens, of which R are followed by a pick."""

    token_ids: Tensor  # [T] int32
    metadata: AttentionMetadata
    sampled: Tensor  # [R] int64, indices into the T tokens
    sampled_rows: list[Row]
    lengths: np.ndarray  # [R] int64, tokens of each sampled row's sequence so far: the position that is picked


class Slots:
    """What the device knows of each slot. Token ids live on the device, so a picked token need not visit the host."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.owners: list[Admission | None] = [None] * num_slots
        self.token_ids = torch.empty((num_slots, max_model_len + 1), dtype=torch.int32, device=device)
        self._blocks = np.zeros((num_slots, -(-max_model_len // block_size)), dtype=np.int32)
        self._num_blocks = [0] * num_slots

    def admit(self, admission: Admission) -> None:
        self.owners[admission.slot] = admission
        self._num_blocks[admission.slot] = 0
        ids = torch.tensor(admission.token_ids, dtype=torch.int32)
        self.token_ids[admission.slot, : len(ids)] = ids

    def build(self, batch: Batch) -> ForwardInputs:
        """Take the batch's new pages in, and lay its tokens out."""
        rows = batch.rows
        for row in rows:
            if row.new_blocks:
                have = self._num_blocks[row.slot]
                self._num_blocks[row.slot] = have + len(row.new_blocks)
                self._blocks[row.slot, have : self._num_blocks[row.slot]] = row.new_blocks
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        owner = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        pages = self._blocks[owner, positions // self.block_size]
        kv_slots = pages.astype(np.int64) * self.block_size + positions % self.block_size
        contexts = starts + counts
        longest = int(contexts.max())
        at = self._tensor(positions)
        metadata = AttentionMetadata(
            query_start=self._tensor(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._tensor(contexts.astype(np.int32)),
            key_start=self._tensor(np.concatenate(([0], np.cumsum(contexts))).astype(np.int32)),
            block_table=self._tensor(self._blocks[slots, : -(-longest // self.block_size)]),
            positions=at,
            slots=self._tensor(kv_slots),
            max_query_len=int(counts.max()),
            max_context_len=longest,
        )
        sampling = np.array([row.sample for row in rows], dtype=bool)
        return ForwardInputs(
            token_ids=self.token_ids[self._tensor(owner), at],
            metadata=metadata,
            sampled=self._tensor(ends[sampling] - 1),
            sampled_rows=[row for row in rows if row.sample],
            lengths=contexts[sampling],
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)
