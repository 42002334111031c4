"""Picking tokens on a GPU: what engine/worker/sampler.py does, for all rows at once, and nothing waits for the device.

What a step needs of its rows' parameters goes over in one copy (one more for each kind of change to logits that some
row asks for); the rest are kernels (kernels/gpu/triton_logits.py, kernels/gpu/triton_sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from quire.engine.worker.grammar import GrammarMask, constrain
from quire.engine.worker.sampler import SamplingRow, end_thinking, sample
from quire.engine.worker.transfer import upload

Sampler = Callable[[Tensor, list[SamplingRow], tuple[int, ...], GrammarMask | None], Tensor]
"""As `sampler.sample`: logits, rows, the model's end-of-sequence tokens, a grammar's mask."""


def choose_sampler(
    device: torch.device, argmax: Callable[[Tensor], Tensor], draw: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Sampler:
    """The one for this device; `argmax` and `draw` are the backend's."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return sample_on_device
    return partial(sample, argmax=argmax, draw=draw)


def sample_on_device(
    logits: Tensor, rows: list[SamplingRow], eos_token_ids: tuple[int, ...], mask: GrammarMask | None = None
) -> Tensor:
    """Token ids [R] int64 for contiguous logits [R, vocab] float32, which may be overwritten."""
    from quire.kernels.gpu.triton_sampling import MOST_TOKENS, pick

    if logits.shape[1] > MOST_TOKENS:
        return sample(logits, rows, eos_token_ids, mask)
    masked = unmodified = None
    if mask is not None:
        masked, allowed = upload([np.array(mask.rows), mask.allowed.numpy()], logits.device)
        unmodified = logits[masked]
    _allow(logits, rows)
    _add(logits, rows, eos_token_ids)
    _ban(logits, rows)
    _penalize(logits, rows)
    for index, row in enumerate(rows):
        if row.params.thinking is not None:
            end_thinking(logits[index], row, row.params.thinking)
    if masked is not None and unmodified is not None:
        logits[masked] = constrain(logits[masked], unmodified, allowed)
    params, vocab = [row.params for row in rows], logits.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    arrays: list[np.ndarray] = [
        np.array([p.temperature for p in params], dtype=np.float32),
        np.array(top_k, dtype=np.int32),
        np.array([p.top_p for p in params], dtype=np.float64),
        np.array([p.min_p for p in params], dtype=np.float32),
        np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64),
        np.array([row.position for row in rows], dtype=np.int64),
    ]
    drawn = [(k, p.top_p) for k, p in zip(top_k, params, strict=True) if not p.greedy]
    filtered = any(k < vocab or top_p < 1 for k, top_p in drawn)
    return pick(logits, *upload(arrays, logits.device), drawn=bool(drawn), filtered=filtered)


def _allow(logits: Tensor, rows: list[SamplingRow]) -> None:
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            (ids,) = upload([np.array(row.params.allowed_token_ids, dtype=np.int64)], logits.device)
            values = logits[index, ids]
            logits[index].fill_(-torch.inf)
            logits[index].index_copy_(0, ids, values)


def _add(logits: Tensor, rows: list[SamplingRow], eos_token_ids: tuple[int, ...]) -> None:
    """Bias, and what forbids tokens by itself: bad words of one token, ends before the minimum length."""
    changes: dict[tuple[int, int], float] = {}
    for index, row in enumerate(rows):
        params = row.params
        changes.update({(index, token): bias for token, bias in (params.logit_bias or {}).items()})
        changes.update({(index, word[0]): -np.inf for word in params.bad_words_ids if len(word) == 1})
        if row.position - row.num_prompt < params.min_tokens:
            ends = [*params.stop_token_ids, *(() if params.ignore_eos and params.grammar is None else eos_token_ids)]
            changes.update({(index, token): -np.inf for token in ends})
    if changes:
        from quire.kernels.gpu.triton_logits import add

        places = np.array(list(changes), dtype=np.int64)
        values = np.array(list(changes.values()), dtype=np.float32)
        add(logits, *upload([places[:, 0], places[:, 1], values], logits.device))


def _ban(logits: Tensor, rows: list[SamplingRow]) -> None:
    """Bad words of several tokens: only what was generated counts as a beginning. The device knows the last token."""
    words = [
        (index, row, word)
        for index, row in enumerate(rows)
        for word in row.params.bad_words_ids
        if 1 < len(word) <= row.position - row.num_prompt + 1
    ]
    if words:
        from quire.kernels.gpu.triton_logits import ban

        of = np.array([(index, row.slot, row.position) for index, row, _ in words], dtype=np.int64)
        tokens = np.concatenate([word for _, _, word in words]).astype(np.int32)
        ends = np.cumsum([0, *(len(word) for _, _, word in words)]).astype(np.int32)
        arrays: list[np.ndarray] = [of[:, 0], of[:, 1], of[:, 2], tokens, ends]
        ban(logits, words[0][1].table, *upload(arrays, logits.device))


def _penalize(logits: Tensor, rows: list[SamplingRow]) -> None:
    penalized = [
        (index, row)
        for index, row in enumerate(rows)
        if row.params.repetition_penalty != 1 or row.params.presence_penalty or row.params.frequency_penalty
    ]
    if penalized:
        from quire.kernels.gpu.triton_logits import penalize

        of = [(index, row.slot, row.position, row.num_prompt) for index, row in penalized]
        index, slot, position, num_prompt = np.array(of, dtype=np.int64).T
        params = [row.params for _, row in penalized]
        by = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        arrays = [index, slot, position, num_prompt, *np.array(by, dtype=np.float32).T]
        there = upload(arrays, logits.device)
        penalize(logits, penalized[0][1].table, *there, longest=int(position.max()))
