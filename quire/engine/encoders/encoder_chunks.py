"""Splits an encoder's work into chunks of one layer and some tokens, so that other steps can run in between. The
output's bits stay the same.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.host_transfer import upload_arrays

_T = TypeVar("_T")
MAX_CHUNK_TOKENS = 1024
"""Larger chunks do not make linears faster."""
QKV_COST_SHARE = 0.25
"""Share of a layer's cost before attention: 3 of the 12 hidden_size² multiplications per token."""
StepChunks = list[tuple[slice, AttentionMetadata]]
"""Per chunk: its range in the step's tokens, and its metadata."""


def run_all_chunks(chunks: Generator[float, None, _T]) -> _T:
    while True:
        try:
            next(chunks)
        except StopIteration as end:
            result: _T = end.value
            return result


def chunk_cost(tokens: float, num_visible: float, hidden: int) -> float:
    """Each token attends to `num_visible` tokens. The unit is that of VisionSpec.encoder_cost."""
    return tokens * (1 + num_visible / (4 * hidden))


def ragged_positions(lengths: np.ndarray) -> np.ndarray:
    """Convert lengths [S] to positions in sequences, [T] int64."""
    starts = np.cumsum(lengths) - lengths
    positions: np.ndarray = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return positions


def count_kv_blocks(lengths: np.ndarray, block_size: int) -> int:
    return int((-(-lengths // block_size)).sum())


def make_chunks_with_metadata(
    lengths: np.ndarray,
    block_size: int,
    device: torch.device,
    max_rows: int | None = None,
    *,
    has_rope_table: bool = False,
) -> StepChunks:
    """Return chunks of at most `max_rows` tokens (None for one chunk). `lengths` is [S] int64. The caller must store
    all keys before any chunk attends. If `has_rope_table`, RoPE's table has a row per token of the step. Does not wait
    for the device.
    """
    num_blocks = -(-lengths // block_size)
    first_blocks, starts = np.cumsum(num_blocks) - num_blocks, np.concatenate(([0], np.cumsum(lengths)))
    longest, count = int(lengths.max()), int(lengths.sum())
    table = np.minimum(first_blocks[:, None] + np.arange(-(-longest // block_size)), num_blocks.sum() - 1)
    positions = ragged_positions(lengths)
    slots = np.repeat(first_blocks * block_size, lengths) + positions
    chunks: StepChunks = []
    for begin in range(0, count, max_rows or count):
        end = min(begin + (max_rows or count), count)
        overlapping = (starts[:-1] < end) & (starts[1:] > begin)
        queries, contexts = np.diff(np.clip(starts, begin, end))[overlapping], lengths[overlapping]
        int32_arrays = (_cumulative_starts(queries), contexts, _cumulative_starts(contexts), table[overlapping])
        query_start, lens, key_start, block_table, chunk_positions, slot_mapping, step_rows = upload_arrays(
            [
                *(each.astype(np.int32) for each in int32_arrays),
                positions[begin:end],
                slots[begin:end],
                np.arange(begin, end),
            ],
            device,
        )
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=lens,
            key_start=key_start,
            block_table=block_table,
            positions=chunk_positions,
            slot_mapping=slot_mapping,
            max_query_len=int(queries.max()),
            max_context_len=int(contexts.max()),
            rope_position_override=step_rows if has_rope_table else None,
            query_key_lens=tuple(zip(queries.tolist(), contexts.tolist(), strict=True)),
        )
        chunks.append((slice(begin, end), metadata))
    return chunks


def _cumulative_starts(counts: np.ndarray) -> np.ndarray:
    """Convert lengths [S] to starts and the last end, [S + 1]."""
    return np.concatenate(([0], counts.cumsum()))
