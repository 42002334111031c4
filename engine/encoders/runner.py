"""The Executor of an encoder: whole prompts in, vectors out. It has no pages, no sampler and nothing to keep but who
was admitted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.batch import Admission, Batch, StepOutput
from quire.engine.encoders.encoder import Encoder
from quire.engine.layers.pooling import PooledRow, Pooler, finished_rows
from quire.engine.types import PoolingParams
from quire.kernels.backend import AttentionMetadata


class Computed:
    """A step that is done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class EncoderRunner:
    def __init__(self, model: Encoder, pooler: Pooler, block_size: int) -> None:
        """`block_size`: tokens of a page of the backend's kernels."""
        self._model = model
        self._pooler = pooler
        self._block_size = block_size
        self._owners: dict[int, Admission] = {}

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Computed:
        for admission in batch.admissions:
            self._owners[admission.slot] = admission
        owners = [self._owners[row.slot] for row in batch.rows]
        pooled, begin = [], 0
        for row, owner in zip(batch.rows, owners, strict=True):
            assert row.count == owner.num_prompt, "an encoder computes whole prompts"
            assert isinstance(owner.params, PoolingParams)
            pooled.append(PooledRow(row, begin, owner.num_prompt, owner.params))
            begin += row.count
        ids = np.concatenate([np.array(owner.token_ids, dtype=np.int32) for owner in owners])
        lengths = np.array([owner.num_prompt for owner in owners], dtype=np.int64)
        token_ids = torch.from_numpy(ids).to(self._model.device)
        metadata = whole_prompts(lengths, self._block_size, self._model.device)
        hidden = self._model.forward(token_ids, self._segments(pooled), metadata)
        vectors = self._pooler.take(pooled, hidden).cpu()
        return Computed(StepOutput({}, vectors=finished_rows(pooled, vectors, self._pooler.pooling)))

    def warm_up(self) -> bool:
        return False

    def mover(self) -> None:
        """It keeps no pages."""

    def state_mover(self) -> None:
        """Nor slots."""

    def load_grammars(self) -> None:
        pass

    def _segments(self, rows: list[PooledRow]) -> Tensor | None:
        """Which of two texts each token is of; None where there are no second ones."""
        if all(each.params.second_segment is None for each in rows):
            return None
        segments = np.zeros(sum(each.length for each in rows), dtype=np.int64)
        for each in rows:
            if each.params.second_segment is not None:
                segments[each.begin + each.params.second_segment : each.begin + each.length] = 1
        return torch.from_numpy(segments).to(self._model.device)


def whole_prompts(lengths: np.ndarray, block_size: int, device: torch.device) -> AttentionMetadata:
    """A step that computes prompts of these lengths [S] int64 from their beginning, each on pages of its own."""
    pages = -(-lengths // block_size)
    first, starts = np.cumsum(pages) - pages, np.cumsum(lengths) - lengths
    longest = int(lengths.max())
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    table = np.minimum(first[:, None] + np.arange(-(-longest // block_size)), pages.sum() - 1)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    slots = np.repeat(first * block_size, lengths) + positions
    narrow = (ends, lengths.astype(np.int32), table.astype(np.int32))
    query_start, context_lens, block_table = (torch.from_numpy(each).to(device) for each in narrow)
    return AttentionMetadata(
        query_start=query_start,
        context_lens=context_lens,
        key_start=query_start,
        block_table=block_table,
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        max_query_len=longest,
        max_context_len=longest,
    )
