"""Host sampler, and reference for device_sampler.py. A sampled token is a pure function of logits, parameters, earlier
tokens, and one uniform number.

Sampling inverts the CDF in vocabulary order and never mixes rows. So a token does not depend on the batch, and is the
same after preemptions and crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.types import TokenLogprob
from quire.engine.worker.sampling.random_draws import uniform_draws
from quire.engine.worker.sampling.sampling_rules import (
    NO_TOKEN_LEFT,
    IndexedRow,
    SamplingRow,
    process_logits_and_find_exhausted,
)
from quire.engine.worker.sampling.slot_grammars import GrammarBitmask
from quire.kernels import reference


def sample_token_ids(
    logits: Tensor,
    rows: list[SamplingRow],
    mask: GrammarBitmask | None = None,
    argmax: Callable[[Tensor], Tensor] = reference.argmax,
    draw: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.sample_tokens,
) -> Tensor:
    """Returns tokens [R] int64, and NO_TOKEN_LEFT in rows whose constraints left none. The logits [R, vocab] float32
    may be overwritten.
    """
    without_tokens = process_logits_and_find_exhausted(logits, rows, mask, HostLogitsProcessor())
    sampled = _sample_rows(logits, rows, argmax, draw)
    return sampled if without_tokens is None else sampled.masked_fill(without_tokens, NO_TOKEN_LEFT)


def _sample_rows(
    logits: Tensor,
    rows: list[SamplingRow],
    argmax: Callable[[Tensor], Tensor],
    draw: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    drawn_indices = [index for index, row in enumerate(rows) if not row.rules.params.is_greedy]
    if not drawn_indices:
        return argmax(logits)
    sampled = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy_indices = [index for index, row in enumerate(rows) if row.rules.params.is_greedy]
    if greedy_indices:
        sampled[greedy_indices] = argmax(logits[greedy_indices])
    drawn_rows = [rows[index] for index in drawn_indices]
    filters = torch.tensor(
        [(row.rules.params.temperature, *row.rules.kernel_filters(logits.shape[1])) for row in drawn_rows],
        dtype=torch.float64,
    )
    u = uniform_draws([row.seed for row in drawn_rows], [row.position for row in drawn_rows]).to(logits.device)
    sampled[drawn_indices] = draw(logits if not greedy_indices else logits[drawn_indices], filters.to(logits.device), u)
    return sampled


class HostLogitsProcessor:
    """If the logits are on a GPU, the host waits for it."""

    def add_biases(self, logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        logits[rows, token_ids] += values

    def ban_words(self, logits: Tensor, words: list[tuple[int, SamplingRow, list[tuple[int, ...]]]]) -> None:
        for index, row, applicable in words:
            longest = max(map(len, applicable), default=1)
            tail = tuple(row.token_ids[row.position - longest + 1 :].tolist())
            banned = [word[-1] for word in applicable if tail[len(tail) - len(word) + 1 :] == word[:-1]]
            if banned:
                logits[index, banned] = -torch.inf

    def apply_penalties(self, logits: Tensor, rows: list[IndexedRow]) -> None:
        for index, row in rows:
            assert row.rules.penalties is not None
            repetition, presence, frequency = row.rules.penalties
            if repetition != 1.0:
                seen = row.token_ids.long().unique()
                values = logits[index, seen]
                logits[index, seen] = torch.where(values > 0, values / repetition, values * repetition)
            if presence or frequency:
                ids, counts = row.token_ids[row.num_prompt_tokens :].long().unique(return_counts=True)
                logits[index, ids] -= presence + frequency * counts

    def apply_bitmask(self, logits: Tensor, mask: GrammarBitmask, unmodified: Tensor | None) -> None:
        # On one core, NumPy unpacks bits 20 times as fast as PyTorch's shifts.
        bits = np.unpackbits(mask.bitmask_words.view(np.uint8), axis=1, bitorder="little")
        for row, allowed in zip(mask.rows, bits[:, : logits.shape[1]].view(bool), strict=True):
            values = logits[row].cpu().numpy()
            values[~allowed] = -np.inf
            if unmodified is not None and values.max() == -np.inf:
                values[allowed] = unmodified[row].cpu().numpy()[allowed]
            if logits.device.type != "cpu":
                logits[row] = torch.from_numpy(values)


def logprob_tensors(
    logits: Tensor, sampled: Tensor, num_top: int, listed_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four tensors for logits [R, vocab]: logprob and rank of `sampled` [R] int64, then top logprobs and their
    ids [R, num_top]. Of equal logprobs, the smaller id comes first. `listed_ids` [R, L] int64 replace the top ids in
    rows that do not start with -1; the last two tensors are then [R, max(num_top, L)]. Does not wait for the device.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    sampled_logprobs = logprobs.gather(-1, sampled[:, None])
    ids = _top_token_ids(logprobs, num_top)
    if listed_ids is not None:
        width = max(num_top, listed_ids.shape[1])
        ids, listed_ids = (F.pad(each, (0, width - each.shape[1])) for each in (ids, listed_ids))
        ids = torch.where(listed_ids[:, :1] >= 0, listed_ids, ids)
    return sampled_logprobs.squeeze(-1), (logprobs > sampled_logprobs).sum(-1) + 1, logprobs.gather(-1, ids), ids


def _top_token_ids(logprobs: Tensor, num_top: int) -> Tensor:
    """Returns [R, num_top]. Orders equal values by id, because torch.topk's choice among them depends on k, and so on
    the batch.
    """
    if logprobs.device.type == "cpu":  # on a GPU the host would wait
        best = torch.topk(logprobs, min(num_top + 1, logprobs.shape[1]))
        if not bool((best.values[:, 1:] == best.values[:, :-1]).any()):
            return best.indices[:, :num_top]
    # Make unique keys that sort by -logprob, then by token. Non-negative floats sort like their bits.
    keys = logprobs.abs().view(torch.int32).long().bitwise_left_shift_(32)
    keys |= torch.arange(logprobs.shape[1], device=logprobs.device)
    return torch.topk(keys, num_top, largest=False).values & 0xFFFFFFFF


def token_logprobs(sampled: Sequence[int], tensors: Iterable[Tensor], tops: Sequence[int]) -> list[TokenLogprob]:
    """`tops`: the number of top logprobs to return per row."""
    sampled_logprobs, ranks, values, ids = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprob(token, sampled_logprobs[i], ranks[i], list(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, (token, top) in enumerate(zip(sampled, tops, strict=True))
    ]


def include_sampled_token(token_logprob: TokenLogprob) -> TokenLogprob:
    values = {**dict(token_logprob.top), token_logprob.token_id: token_logprob.logprob}
    return msgspec.structs.replace(token_logprob, top=sorted(values.items(), key=lambda item: (-item[1], item[0])))
