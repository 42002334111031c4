"""DRY ("don't repeat yourself"), by p-e-w (2024, pull request 5677 of text-generation-webui), with the sequence
breakers of llama.cpp.

A token that followed an earlier occurrence of the last tokens would extend a repetition. Its logit is lowered by
multiplier * base ** (length - allowed length), where length counts the tokens of the longest such occurrence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.request_params import SamplingParams
from quire.kernels.gpu.host_transfer import upload_arrays

_MAX_EXPONENT = 64
"""The penalty grows up to this exponent: with a base of 1.75, to more than 1e15."""
_MAX_PENALTY = 1e30
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DryRule:
    penalties: np.ndarray
    """[max_length + 1] float32, indexed by the repetition's length."""
    last_n: int
    """-1: all tokens."""
    breaker_tokens: np.ndarray
    """[S] int32: the sequence breakers of one token."""
    breaker_sequences: np.ndarray
    """[B, W] int32: the longer ones, padded with -1 on the left."""


def make_dry_rule(params: SamplingParams) -> DryRule | None:
    if not params.has_dry:
        return None
    allowed = params.dry_allowed_length
    penalties = np.zeros(allowed + _MAX_EXPONENT + 1)
    growth = np.power(params.dry_base, np.arange(_MAX_EXPONENT + 1, dtype=np.float64))
    penalties[allowed:] = np.minimum(params.dry_multiplier * growth, _MAX_PENALTY)
    tokens = np.array([ids[0] for ids in params.dry_sequence_breaker_ids if len(ids) == 1], dtype=np.int32)
    longer = [ids for ids in params.dry_sequence_breaker_ids if len(ids) > 1]
    sequences = np.full((len(longer), max(map(len, longer), default=1)), _NO_TOKEN, dtype=np.int32)
    for row, ids in zip(sequences, longer, strict=True):
        row[-len(ids) :] = ids
    return DryRule(penalties.astype(np.float32), params.dry_penalty_last_n, tokens, sequences)


def penalize_repetitions(logits: Tensor, token_ids: Tensor, rule: DryRule) -> None:
    """Changes logits [vocab] in place. `token_ids`: [n] int32, the prompt and the answer. The host does not wait for a
    GPU.
    """
    tokens = token_ids if rule.last_n < 0 else token_ids[-rule.last_n :]
    if len(tokens) < 2:
        return
    max_length = len(rule.penalties) - 1
    penalties, breaker_tokens, breaker_sequences = upload_arrays(
        [rule.penalties, rule.breaker_tokens, rule.breaker_sequences], logits.device
    )
    windows = _windows_ending_at_tokens(tokens, max_length)
    earlier, following = windows[:-1], tokens[1:].long()
    if tokens.device.type == "cpu":  # on a GPU the host would wait for nonzero
        matching = (tokens[:-1] == tokens[-1]).nonzero()[:, 0]
        earlier, following = earlier[matching], following[matching]
    indices = torch.arange(max_length, dtype=torch.int16, device=logits.device)
    last_mismatch = torch.where(earlier != windows[-1], indices, -1).amax(1).long()
    limit = _num_tokens_after_breaker(tokens, breaker_tokens, breaker_sequences, max_length)
    lengths = (max_length - 1 - last_mismatch).clamp(max=limit)
    longest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    longest.scatter_reduce_(0, following, lengths, "amax")
    logits -= penalties[longest]


def _windows_ending_at_tokens(tokens: Tensor, width: int) -> Tensor:
    """[n, width]: each token, after the width - 1 tokens before it."""
    return F.pad(tokens, (width - 1, 0), value=_NO_TOKEN).unfold(0, width, 1)


def _num_tokens_after_breaker(
    tokens: Tensor, breaker_tokens: Tensor, breaker_sequences: Tensor, max_length: int
) -> Tensor:
    """Counted from the last sequence breaker; at most `max_length`."""
    ends = (tokens[-max_length:, None] == breaker_tokens).any(1)
    if len(breaker_sequences):
        width = breaker_sequences.shape[1]
        windows = _windows_ending_at_tokens(tokens[-(max_length + width) :], width)[-max_length:]
        ends |= ((windows[:, None] == breaker_sequences) | (breaker_sequences == _NO_TOKEN)).all(2).any(1)
    distances = torch.arange(len(ends) - 1, -1, -1, device=tokens.device)
    return torch.where(ends, distances, max_length).amin()
