"""Picking tokens: a pure function of logits, parameters, the tokens so far, and one uniform number per token. What
engine/worker/device_sampler.py does on a GPU is held to this.

The number comes from (seed, position) by SplitMix64 (Steele et al., 2014), the pick is by inverse CDF in vocabulary
order, and no step mixes rows. So a token does not depend on the batch, and is drawn again alike after a preemption or
a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.types import SamplingParams, ThinkingBudget, TokenLogprob
from quire.engine.worker.grammar import GrammarMask, constrain
from quire.kernels import reference


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One pick to make."""

    params: SamplingParams
    seed: int
    position: int
    """Of the token to pick, in its sequence."""
    num_prompt: int
    table: Tensor
    """[slots, most tokens] int32: every slot's tokens, on the logits' device."""
    slot: int

    @property
    def token_ids(self) -> Tensor:
        """[position] int32, the tokens so far."""
        return self.table[self.slot, : self.position]


def sample(
    logits: Tensor,
    rows: list[SamplingRow],
    eos_token_ids: tuple[int, ...],
    mask: GrammarMask | None = None,
    argmax: Callable[[Tensor], Tensor] = reference.argmax,
    draw: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.draw,
) -> Tensor:
    """Token ids [R] int64 for logits [R, vocab] float32, which may be overwritten. `argmax` and `draw` are the
    backend's."""
    unmodified = None if mask is None else logits[mask.rows]
    for index, row in enumerate(rows):
        adjust(logits[index], row, eos_token_ids)
    if mask is not None and unmodified is not None:
        logits[mask.rows] = constrain(logits[mask.rows], unmodified, mask.allowed)
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        return argmax(logits)
    picks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy = [index for index, row in enumerate(rows) if row.params.greedy]
    if greedy:
        picks[greedy] = argmax(logits[greedy])
    chosen = [rows[index] for index in drawn]
    filters = torch.tensor([_filters(row.params, logits.shape[1]) for row in chosen], dtype=torch.float64)
    u = uniforms(chosen).to(logits.device)
    picks[drawn] = draw(logits if not greedy else logits[drawn], filters.to(logits.device), u)
    return picks


def _filters(params: SamplingParams, vocab: int) -> tuple[float, ...]:
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    return params.temperature, top_k, params.top_p, params.min_p


def adjust(logits: Tensor, row: SamplingRow, eos_token_ids: tuple[int, ...]) -> None:
    """What may be picked at all, bias, minimum length and penalties on one row's logits [vocab], in place."""
    params = row.params
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        forbidden[torch.tensor(params.allowed_token_ids, device=logits.device)] = False
        logits.masked_fill_(forbidden, -torch.inf)
    if params.bad_words_ids:
        logits[_last_of_bad_words(row)] = -torch.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if row.position - row.num_prompt < params.min_tokens:
        ends = [*params.stop_token_ids, *(() if params.ignore_eos and params.grammar is None else eos_token_ids)]
        logits[ends] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = row.token_ids.long().unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = row.token_ids[row.num_prompt :].long().unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.thinking is not None:
        end_thinking(logits, row, params.thinking)


def end_thinking(logits: Tensor, row: SamplingRow, budget: ThinkingBudget) -> None:
    """Leave only the token that ends the thinking, where that is under way and has used up its budget."""
    answer = row.token_ids[row.num_prompt :]
    if len(answer) - (budget.begin_id is not None) < budget.tokens:
        return
    due = ~(answer == budget.end_id).any()
    if budget.begin_id is not None:  # the beginning counts itself: tokens from it on
        due &= (answer == budget.begin_id).cumsum(0).bool().sum() > budget.tokens
    end = torch.full_like(logits, -torch.inf)
    end[budget.end_id] = 0.0
    torch.where(due, end, logits, out=logits)


def _last_of_bad_words(row: SamplingRow) -> list[int]:
    """Tokens that would complete a bad word; only what was generated counts as its beginning, as in vLLM."""
    words = row.params.bad_words_ids
    longest = max(map(len, words))
    begin = max(row.num_prompt, row.position - longest + 1)
    tail = tuple(row.token_ids[begin : row.position].tolist()) if longest > 1 else ()
    return [word[-1] for word in words if len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1 :] == word[:-1]]


def uniforms(rows: list[SamplingRow]) -> Tensor:
    """One float64 in [0, 1) per row, from its seed and position."""
    seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64)
    positions = np.array([row.position for row in rows], dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = _mix(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer; seeds pass it too, so that neighbouring seeds share no part of their streams."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def logprob_tensors(logits: Tensor, picked: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Under unmodified logits [R, vocab]: log probability and rank of the picked tokens [R] int64, and the `most` most
    likely log probabilities and tokens [R, most]. Nothing waits for the device."""
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(-1, picked[:, None])
    best = torch.topk(logprobs, most)
    return own.squeeze(-1), (logprobs > own).sum(-1) + 1, best.values, best.indices


def token_logprobs(picked: Sequence[int], tensors: Iterable[Tensor], tops: Sequence[int]) -> list[TokenLogprob]:
    """What `logprob_tensors` found, each picked token with as many of the most likely ones as `tops` says."""
    own, ranks, values, ids = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprob(token, own[i], ranks[i], list(zip(ids[i][:top], values[i][:top], strict=True)))
        for i, (token, top) in enumerate(zip(picked, tops, strict=True))
    ]
