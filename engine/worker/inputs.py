"""From a Batch to tensors. Slots are the device's memory of sequences: token ids, page tables, sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.types import Admission, Batch, Row
from engine.worker.transfer import upload
from kernels.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One step's tensors: T tokens, of which R are followed by a pick."""

    token_ids: Tensor  # [T] int32
    metadata: AttentionMetadata
    sampled: Tensor  # [R] int64, indices into the T tokens


@dataclass(frozen=True, slots=True)
class Picks:
    """The R picks that a step makes."""

    rows: list[Row]
    lengths: np.ndarray  # [R] int64, tokens of each row's sequence so far: the position that is picked
    slots: Tensor  # [R] int64, on the device
    positions: Tensor  # [R] int64, `lengths` on the device


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
        ids = upload([np.array(admission.token_ids, dtype=np.int32)], self.device)[0]
        self.token_ids[admission.slot, : len(ids)] = ids

    def take_pages(self, rows: list[Row]) -> None:
        """Put a batch's new pages into the page tables."""
        for row in rows:
            if row.new_blocks:
                have = self._num_blocks[row.slot]
                self._num_blocks[row.slot] = have + len(row.new_blocks)
                self._blocks[row.slot, have : self._num_blocks[row.slot]] = row.new_blocks

    def build(self, batch: Batch) -> tuple[ForwardInputs, Picks]:
        """Lay a batch's tokens out; its pages were taken."""
        rows = batch.rows
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.count for row in rows], dtype=np.int64)
        sampling = np.array([row.sample for row in rows], dtype=bool)
        ends = np.cumsum(counts)
        owner = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        pages = self._blocks[owner, positions // self.block_size]
        contexts = starts + counts
        longest = int(contexts.max())
        query_start, context_lens, key_start, block_table, at, kv_slots, owners, sampled, picked, lengths = upload(
            [
                np.concatenate(([0], ends)).astype(np.int32),
                contexts.astype(np.int32),
                np.concatenate(([0], np.cumsum(contexts))).astype(np.int32),
                self._blocks[slots, : -(-longest // self.block_size)],
                positions,
                pages.astype(np.int64) * self.block_size + positions % self.block_size,
                owner,
                ends[sampling] - 1,
                slots[sampling],
                contexts[sampling],
            ],
            self.device,
        )
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            key_start=key_start,
            block_table=block_table,
            positions=at,
            slots=kv_slots,
            max_query_len=int(counts.max()),
            max_context_len=longest,
        )
        picks = Picks([row for row in rows if row.sample], contexts[sampling], picked, lengths)
        return ForwardInputs(self.token_ids[owners, at], metadata, sampled), picks
