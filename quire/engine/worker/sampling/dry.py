"""DRY ("don't repeat yourself"), by p-e-w (2024, pull request 5677 of text-generation-webui), with the sequence
breakers of llama.cpp.

A token that followed an earlier occurrence of the last tokens would extend a repetition. Its logit is lowered by
multiplier * base ** (length - allowed length), where length is the number of last tokens that the longest such
occurrence repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.request_params import SamplingParams
from quire.kernels.gpu.host_transfer import upload_arrays

_MAX_EXPONENT = 64
"""1.75 ** 64 is more than 1e15."""
_MAX_PENALTY = 1e30
_NO_TOKEN = -1
_FACTOR, _MIX_FACTOR = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
"""They must be odd, and are otherwise arbitrary."""


@dataclass(frozen=True, slots=True)
class DryRule:
    penalties: np.ndarray
    """[max_length + 1] float32, indexed by the repetition's length."""
    last_n: int
    """Last tokens that are searched for repetitions; -1 means all."""
    breaker_lengths: np.ndarray
    """[L] int64: the distinct lengths of sequence breakers."""
    breaker_hashes: np.ndarray
    """[B] int64, sorted."""
    powers: np.ndarray
    """[2, max_length + the longest breaker] int64: powers of _FACTOR and of its inverse, for hashes of windows."""


def make_dry_rule(params: SamplingParams) -> DryRule:
    """Call only if `params.has_dry`."""
    allowed = params.dry_allowed_length
    penalties = np.zeros(allowed + _MAX_EXPONENT + 1)
    growth = np.power(params.dry_base, np.arange(_MAX_EXPONENT + 1, dtype=np.float64))
    penalties[allowed:] = np.minimum(params.dry_multiplier * growth, _MAX_PENALTY)
    breakers = params.dry_sequence_breaker_ids
    lengths = sorted({len(ids) for ids in breakers})
    hashes = [_hash_sequences([ids for ids in breakers if len(ids) == length]) for length in lengths]
    num_powers = len(penalties) + max(lengths, default=0)
    return DryRule(
        penalties.astype(np.float32),
        params.dry_penalty_last_n,
        np.array(lengths, dtype=np.int64),
        np.sort(np.concatenate(hashes)) if hashes else np.zeros(0, dtype=np.int64),
        np.stack([_list_powers(each, num_powers) for each in (_FACTOR, pow(_FACTOR, -1, 2**64))]),
    )


def _hash_sequences(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns hashes modulo 2**64, because int64 arithmetic wraps."""
    tokens = np.array(sequences, dtype=np.int64)
    return (_mix(tokens) * _list_powers(_FACTOR, tokens.shape[1])).sum(1)


def _mix(tokens: Any) -> Any:
    """`tokens`: an array or a tensor of int64."""
    mixed = (tokens + 1) * _MIX_FACTOR
    return (mixed ^ (mixed >> 29)) * _MIX_FACTOR


def _list_powers(factor: int, count: int) -> np.ndarray:
    factors = np.full(count, factor, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64).view(np.int64)


def penalize_repetitions(logits: Tensor, token_ids: Tensor, rule: DryRule) -> None:
    """Changes logits [vocab] in place. `token_ids`: [n] int32, the prompt and the answer. The host does not wait for a
    GPU.
    """
    tokens = token_ids if rule.last_n < 0 else token_ids[-rule.last_n :]
    if len(tokens) < 2:
        return
    max_length = len(rule.penalties) - 1
    (penalties,) = upload_arrays([rule.penalties], logits.device)
    windows = _windows_ending_at_tokens(tokens, max_length)
    earlier, following = windows[:-1], tokens[1:].long()
    if tokens.device.type == "cpu":  # on a GPU the host would wait for nonzero
        matching = (tokens[:-1] == tokens[-1]).nonzero()[:, 0]
        earlier, following = earlier[matching], following[matching]
    indices = torch.arange(max_length, dtype=torch.int16, device=logits.device)
    last_mismatch = torch.where(earlier != windows[-1], indices, -1).amax(1).long()
    lengths = max_length - 1 - last_mismatch
    if len(rule.breaker_hashes):
        lengths = lengths.clamp(max=_num_tokens_after_breaker(tokens, rule, max_length))
    longest = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    longest.scatter_reduce_(0, following, lengths, "amax")
    logits -= penalties[longest]


def _windows_ending_at_tokens(tokens: Tensor, width: int) -> Tensor:
    """Returns [n, width]."""
    return F.pad(tokens, (width - 1, 0), value=_NO_TOKEN).unfold(0, width, 1)


def _num_tokens_after_breaker(tokens: Tensor, rule: DryRule, max_length: int) -> Tensor:
    breaker_lengths, hashes, powers = upload_arrays(
        [rule.breaker_lengths, rule.breaker_hashes, rule.powers], tokens.device
    )
    tail = tokens[-rule.powers.shape[1] :].long()
    sums = F.pad((_mix(tail) * powers[0, : len(tail)]).cumsum(0), (1, 0))
    ends = torch.arange(max(0, len(tail) - max_length), len(tail), device=tokens.device) + 1
    starts = ends[:, None] - breaker_lengths
    begun = starts.clamp(min=0)
    windows = (sums[ends][:, None] - sums[begun]) * powers[1][begun]
    nearest = torch.searchsorted(hashes, windows).clamp(max=len(hashes) - 1)
    is_end = ((hashes[nearest] == windows) & (starts >= 0)).any(1)
    return torch.where(is_end, len(tail) - ends, max_length).amin()
