"""Sampler for GPUs, equivalent to sampler.py. The host never waits for the GPU, unless the vocabulary has more than
MAX_VOCAB tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from quire.engine.worker.sampling.sampler import sample_token_ids
from quire.engine.worker.sampling.sampling_rules import (
    NO_TOKEN_LEFT,
    IndexedRow,
    SamplingRow,
    process_logits_and_find_exhausted,
)
from quire.engine.worker.sampling.slot_grammars import GrammarBitmask
from quire.kernels.collective import Collective
from quire.kernels.gpu.host_transfer import upload_arrays
from quire.kernels.gpu.other_devices import is_other_device

Sampler = Callable[[Tensor, list[SamplingRow], GrammarBitmask | None], Tensor]


def choose_sampler(
    device: torch.device,
    argmax: Callable[[Tensor], Tensor],
    draw: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Collective | None = None,
) -> Sampler:
    triton = device.type == "cuda" and find_spec("triton") is not None
    sampler: Sampler = sample_on_device if triton else partial(sample_token_ids, argmax=argmax, draw=draw)
    if is_other_device(device):
        sampler = sample_on_host
    return sampler if group is None else partial(_sample_on_first_rank, sampler, group)


def sample_on_host(logits: Tensor, rows: list[SamplingRow], mask: GrammarBitmask | None = None) -> Tensor:
    """For devices without float64, which sampling needs."""
    host_rows = [
        row
        if row.rules.keeps_logits_unchanged
        else row._replace(token_table=row.token_table[row.slot].cpu()[None], slot=0)
        for row in rows
    ]
    return sample_token_ids(logits.cpu(), host_rows, mask).to(logits.device)


def _sample_on_first_rank(
    sampler: Sampler, group: Collective, logits: Tensor, rows: list[SamplingRow], mask: GrammarBitmask | None
) -> Tensor:
    """Samples on the first rank, because only that rank has grammars, seeds and penalties."""
    if group.rank == 0:
        return group.broadcast(sampler(logits, rows, mask))
    return group.broadcast(torch.empty(len(logits), dtype=torch.int64, device=logits.device))


def sample_on_device(logits: Tensor, rows: list[SamplingRow], mask: GrammarBitmask | None = None) -> Tensor:
    """`logits` must be contiguous."""
    from quire.kernels.gpu.triton_sampling import MAX_VOCAB, sample_tokens

    if logits.shape[1] > MAX_VOCAB:
        return sample_token_ids(logits, rows, mask)
    without_tokens = process_logits_and_find_exhausted(logits, rows, mask, DeviceLogitsProcessor())
    params_list, vocab = [row.rules.params for row in rows], logits.shape[1]
    filters = [row.rules.kernel_filters(vocab) for row in rows]
    arrays: list[np.ndarray] = [
        np.array([0.0 if each.is_greedy else each.temperature for each in params_list], dtype=np.float32),
        np.array([top_k for top_k, _, _ in filters], dtype=np.int32),
        np.array([top_p for _, top_p, _ in filters], dtype=np.float64),
        np.array([min_p for _, _, min_p in filters], dtype=np.float32),
        np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64),
        np.array([row.position for row in rows], dtype=np.int64),
    ]
    sampled_row_filters = [each for each, params in zip(filters, params_list, strict=True) if not params.is_greedy]
    has_filters = any(top_k < vocab or top_p < 1 for top_k, top_p, _ in sampled_row_filters)
    sampled = sample_tokens(
        logits, *upload_arrays(arrays, logits.device), has_sampling=bool(sampled_row_filters), has_filters=has_filters
    )
    return sampled if without_tokens is None else sampled.masked_fill(without_tokens, NO_TOKEN_LEFT)


class DeviceLogitsProcessor:
    def add_biases(self, logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        from quire.kernels.gpu.triton_logits import add_logit_bias

        add_logit_bias(logits, rows, token_ids, values)

    def ban_words(self, logits: Tensor, words: list[tuple[int, SamplingRow, list[tuple[int, ...]]]]) -> None:
        from quire.kernels.gpu.triton_logits import ban_bad_words

        word_rows = [(index, row, word) for index, row, row_words in words for word in row_words]
        row_array = np.array([(index, row.slot, row.position) for index, row, _ in word_rows], dtype=np.int64)
        tokens = np.concatenate([word for _, _, word in word_rows]).astype(np.int32)
        ends = np.cumsum([0, *(len(word) for _, _, word in word_rows)]).astype(np.int32)
        arrays: list[np.ndarray] = [row_array[:, 0], row_array[:, 1], row_array[:, 2], tokens, ends]
        ban_bad_words(logits, words[0][1].token_table, *upload_arrays(arrays, logits.device))

    def apply_penalties(self, logits: Tensor, rows: list[IndexedRow]) -> None:
        from quire.kernels.gpu.triton_logits import penalize_tokens

        row_array = [(index, row.slot, row.position, row.num_prompt_tokens) for index, row in rows]
        index, slot, position, num_prompt = np.array(row_array, dtype=np.int64).T
        penalty_array = np.array([row.rules.penalties for _, row in rows], dtype=np.float32).T
        on_device = upload_arrays([index, slot, position, num_prompt, *penalty_array], logits.device)
        penalize_tokens(logits, rows[0][1].token_table, *on_device, longest=int(position.max()))

    def apply_bitmask(self, logits: Tensor, mask: GrammarBitmask, unmodified: Tensor | None) -> None:
        rows, words = upload_arrays([np.array(mask.rows), mask.bitmask_words], logits.device)
        bit_indices = torch.arange(8, dtype=torch.uint8, device=words.device)
        bits = words.view(torch.uint8)[:, :, None].bitwise_right_shift(bit_indices).bitwise_and_(1)
        allowed = bits.flatten(1).view(torch.bool)[:, : logits.shape[1]]
        constrained = logits[rows].masked_fill(
            ~allowed, -torch.inf
        )  # torch.where would copy a scalar to the GPU and wait
        if unmodified is not None:
            stuck = constrained.amax(-1, keepdim=True) == -torch.inf
            constrained = torch.where(stuck & allowed, unmodified[rows], constrained)
        logits[rows] = constrained
