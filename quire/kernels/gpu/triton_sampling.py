"""Samples tokens without sorting, and without making the host wait. Results equal those of
engine/worker/sampling/sampler.py.

A token's weight is exp(scaled logit - largest) in fixed point. Sums are exact in any order, so neither chunks nor
batches change a sample. A filter keeps tokens whose weight is at least a threshold. Bisection over float32 bits finds
the threshold among the candidates that a histogram by powers of two leaves, or in the whole vocabulary if the
distribution is flat.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2

_CHUNK = tl.constexpr(4096)
_LEVELS = tl.constexpr(16)
"""Histogram levels of weights. Level 0 is the largest weight, 1. Level j is [2^-j, 2^(1 - j)). The last level has all
smaller weights.
"""
_CANDIDATES = tl.constexpr(4096)
_ONE = tl.constexpr(float(2**44))
"""1 in fixed point. MAX_VOCAB times this fits an int64."""
MAX_VOCAB = 2**19 - 1


@triton.jit
def _load_token_weights(logits, at, inside, temperature, peak):
    """Return weights relative to the largest logit, `peak`, both as float32 bits and in fixed point."""
    scaled = tl.div_rn(tl.load(logits + at, mask=inside, other=float("-inf")), temperature)
    top = tl.div_rn(peak, temperature)
    weight = tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - top))
    return weight.to(tl.int32, bitcast=True), (weight * _ONE).to(tl.int64)


@triton.jit
def _row_peak(peaks, row, chunks, CHUNKS: tl.constexpr):
    i = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + row * chunks + i, mask=i < chunks, other=float("-inf")), 0)


@triton.jit
def find_chunk_peaks(peaks, places, logits, vocab, chunks):
    """Find each chunk's largest logit and the first token with it: [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    value = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf"))
    peak = tl.max(value, 0)
    tl.store(peaks + row * chunks + chunk, peak)
    tl.store(places + row * chunks + chunk, tl.min(tl.where(value == peak, token, vocab - 1), 0))


@triton.jit
def sum_chunk_weights(
    counts, masses, kept, logits, peaks, temperatures, min_ps, vocab, chunks,
    CHUNKS: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Sum each chunk's weights after min-p to kept [rows, chunks]. If FILTERED, also compute counts and masses [rows,
    chunks, levels] before min-p.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        token = chunk * _CHUNK + tl.arange(0, _CHUNK)
        inside = token < vocab
        peak = _row_peak(peaks, row, chunks, CHUNKS)
        bits, mass = _load_token_weights(logits, row * vocab + token, inside, temperature, peak)
        least = tl.load(min_ps + row).to(tl.int32, bitcast=True)
        tl.store(kept + row * chunks + chunk, tl.sum(tl.where(bits >= least, mass, 0), 0))
        if FILTERED:
            level = tl.minimum(127 - (bits >> 23), _LEVELS - 1)
            at = (row * chunks + chunk) * _LEVELS
            for each in tl.static_range(_LEVELS):
                here = inside & (level == each)
                tl.store(counts + at + each, tl.sum(here.to(tl.int32), 0))
                tl.store(masses + at + each, tl.sum(tl.where(here, mass, 0), 0))


@triton.jit
def _find_cutoff_level(counts, masses, row, chunks, top_k, top_p, vocab, CHUNKS: tl.constexpr):
    """Return (level at which filters cut, each chunk's number of tokens down to that level [CHUNKS], weight of all
    levels).
    """
    chunk, level = tl.arange(0, CHUNKS)[:, None], tl.arange(0, _LEVELS)
    at = (row * chunks + chunk) * _LEVELS + level[None, :]
    count = tl.load(counts + at, mask=chunk < chunks, other=0)
    mass = tl.sum(tl.load(masses + at, mask=chunk < chunks, other=0), 0)
    whole = tl.sum(mass, 0)
    enough = tl.cumsum(mass, 0).to(tl.float64) >= top_p * whole.to(tl.float64)
    if top_k < vocab:
        enough = tl.cumsum(tl.sum(count, 0), 0) >= top_k
    last = tl.min(tl.where(enough, level, _LEVELS - 1), 0)
    return last, tl.sum(tl.where(level[None, :] <= last, count, 0), 1), whole


@triton.jit
def gather_candidates(
    bits_found, tokens_found, counts, masses, logits, peaks, temperatures, top_ks, top_ps, vocab, chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Store candidates in vocabulary order, unless there are more than _CANDIDATES."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if (temperature > 0) & ((top_k < vocab) | (top_p < 1)):
        last, chunk_candidates, _whole = _find_cutoff_level(counts, masses, row, chunks, top_k, top_p, vocab, CHUNKS)
        i = tl.arange(0, CHUNKS)
        before = tl.sum(tl.where(i < chunk, chunk_candidates, 0), 0)
        if (tl.sum(chunk_candidates, 0) <= _CANDIDATES) & (tl.sum(tl.where(i == chunk, chunk_candidates, 0), 0) > 0):
            token = chunk * _CHUNK + tl.arange(0, _CHUNK)
            inside = token < vocab
            peak = _row_peak(peaks, row, chunks, CHUNKS)
            bits, _mass = _load_token_weights(logits, row * vocab + token, inside, temperature, peak)
            here = inside & (tl.minimum(127 - (bits >> 23), _LEVELS - 1) <= last)
            at = row * _CANDIDATES + before + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(bits_found + at, bits, mask=here)
            tl.store(tokens_found + at, token, mask=here)


@triton.jit
def _uniform(seed, position):
    """Return SplitMix64 of (seed, position) as random_draws.uniform_draws does, float64 in [0, 1)."""
    z = _mix(seed.to(tl.uint64, bitcast=True)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(z) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _first_cumsum_above(mass, target):
    """Return (first index in mass [N] where the cumulative sum exceeds `target`, sum before it)."""
    sums = tl.cumsum(mass, 0)
    index = tl.min(tl.where(sums > target, tl.arange(0, mass.shape[0]), mass.shape[0] - 1), 0)
    return index, tl.sum(tl.where(tl.arange(0, mass.shape[0]) < index, mass, 0), 0)


@triton.jit
def _draw_target_mass(mass, u):
    """u * mass may round up to mass, so it is limited to mass - 1."""
    return tl.minimum((u * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def _count_and_mass_at_least(
    least, bits, mass, row, logits, peaks, temperature, vocab, chunks, CHUNKS: tl.constexpr, ALL: tl.constexpr
):
    """Return the number and total weight of tokens whose weight has at least the bits `least`, in the vocabulary if
    ALL, otherwise among the candidates.
    """
    if ALL:
        count, total = least * 0, (least * 0).to(tl.int64)
        peak = _row_peak(peaks, row, chunks, CHUNKS)
        for chunk in range(chunks):
            token = chunk * _CHUNK + tl.arange(0, _CHUNK)
            weight, fixed = _load_token_weights(logits, row * vocab + token, token < vocab, temperature, peak)
            enough = (weight >= least) & (token < vocab)
            count += tl.sum(enough.to(tl.int32), 0)
            total += tl.sum(tl.where(enough, fixed, 0), 0)
        return count, total
    else:
        return tl.sum((bits >= least).to(tl.int32), 0), tl.sum(tl.where(bits >= least, mass, 0), 0)


@triton.jit
def _top_k_top_p_threshold(
    bits, mass, whole, top_k, top_p, row, logits, peaks, temperature, vocab, chunks,
    CHUNKS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Return the bits of the least weight that top-k keeps, and that top-p keeps among the tokens left by top-k.
    `whole` is the weight of all tokens.
    """
    least = top_k * 0
    if top_k < vocab:
        for i in range(30):
            trial = least | (1 << (29 - i))
            count, _mass = _count_and_mass_at_least(
                trial, bits, mass, row, logits, peaks, temperature, vocab, chunks, CHUNKS, ALL
            )
            least = tl.where(count >= top_k, trial, least)
        count, above = _count_and_mass_at_least(
            least + 1, bits, mass, row, logits, peaks, temperature, vocab, chunks, CHUNKS, ALL
        )
        whole = above + (top_k - count) * (least.to(tl.float32, bitcast=True) * _ONE).to(tl.int64)
    if top_p < 1:
        target = top_p * whole.to(tl.float64)
        least = top_k * 0
        for i in range(30):
            trial = least | (1 << (29 - i))
            _count, total = _count_and_mass_at_least(
                trial, bits, mass, row, logits, peaks, temperature, vocab, chunks, CHUNKS, ALL
            )
            least = tl.where(total.to(tl.float64) >= target, trial, least)
    return least


@triton.jit
def _pick_candidate(bits_found, tokens_found, found, whole, least, u, row, top_k, top_p, vocab):
    i = tl.arange(0, _CANDIDATES)
    at = row * _CANDIDATES + i
    bits = tl.load(bits_found + at, mask=i < found, other=0)
    mass = tl.where(i < found, (bits.to(tl.float32, bitcast=True) * _ONE).to(tl.int64), 0)
    filtered = _top_k_top_p_threshold(bits, mass, whole, top_k, top_p, row, bits, bits, u, vocab, 0, 1, False)
    mass = tl.where(bits >= tl.maximum(filtered, least), mass, 0)
    index, _before = _first_cumsum_above(mass, _draw_target_mass(tl.sum(mass, 0), u))
    return tl.load(tokens_found + row * _CANDIDATES + tl.minimum(index, found - 1))


@triton.jit
def _pick_in_chunk(logits, peak, temperature, row, chunk, left, least, vocab):
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    bits, mass = _load_token_weights(logits, row * vocab + token, token < vocab, temperature, peak)
    index, _before = _first_cumsum_above(tl.where(bits >= least, mass, 0), left)
    return tl.minimum(chunk * _CHUNK + index, vocab - 1)


@triton.jit
def _pick_from_all_tokens(logits, peaks, temperature, row, least, u, vocab, chunks, CHUNKS: tl.constexpr):
    _count, whole = _count_and_mass_at_least(
        least, least, least, row, logits, peaks, temperature, vocab, chunks, CHUNKS, True
    )
    target = _draw_target_mass(whole, u)
    peak = _row_peak(peaks, row, chunks, CHUNKS)
    chosen, before, total = least * 0, whole * 0, whole * 0
    for chunk in range(chunks):
        token = chunk * _CHUNK + tl.arange(0, _CHUNK)
        bits, mass = _load_token_weights(logits, row * vocab + token, token < vocab, temperature, peak)
        after = total + tl.sum(tl.where(bits >= least, mass, 0), 0)
        here = (total <= target) & (target < after)
        chosen, before = tl.where(here, chunk, chosen), tl.where(here, total, before)
        total = after
    return _pick_in_chunk(logits, peak, temperature, row, chosen, target - before, least, vocab)


@triton.jit
def pick_tokens(
    picks, logits, peaks, places, kept, counts, masses, bits_found, tokens_found,
    temperatures, top_ks, top_ps, min_ps, seeds, positions, vocab, chunks,
    CHUNKS: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Write the sampled tokens to picks [rows] int64."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    peak = _row_peak(peaks, row, chunks, CHUNKS)
    chunk_peaks = tl.load(peaks + row * chunks + i, mask=i < chunks, other=float("-inf"))
    place = tl.load(places + row * chunks + i, mask=i < chunks, other=vocab - 1)
    token = tl.min(tl.where(chunk_peaks == peak, place, vocab - 1), 0)
    if (temperature > 0) & (peak > float("-inf")):
        least = tl.load(min_ps + row).to(tl.int32, bitcast=True)
        u = _uniform(tl.load(seeds + row), tl.load(positions + row))
        if FILTERED and ((top_k < vocab) | (top_p < 1)):
            _last, down, whole = _find_cutoff_level(counts, masses, row, chunks, top_k, top_p, vocab, CHUNKS)
            num_candidates = tl.sum(down, 0)
            if num_candidates <= _CANDIDATES:
                token = _pick_candidate(
                    bits_found, tokens_found, num_candidates, whole, least, u, row, top_k, top_p, vocab
                )
            else:
                cut = _top_k_top_p_threshold(
                    least, least, whole, top_k, top_p, row, logits, peaks, temperature, vocab, chunks, CHUNKS, True
                )
                least = tl.maximum(least, cut)
                token = _pick_from_all_tokens(logits, peaks, temperature, row, least, u, vocab, chunks, CHUNKS)
        else:
            mass = tl.load(kept + row * chunks + i, mask=i < chunks, other=0)
            target = _draw_target_mass(tl.sum(mass, 0), u)
            chunk, before = _first_cumsum_above(mass, target)
            token = _pick_in_chunk(logits, peak, temperature, row, chunk, target - before, least, vocab)
    tl.store(picks + row, token.to(tl.int64))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    *,
    has_sampling: bool,
    has_filters: bool,
) -> Tensor:
    """Sample tokens [R] int64 from logits [R, vocab] float32.

    Parameters are [R]: temperature float32, 0 for the first largest logit; top_k int32, vocab for all; top_p float64;
    min_p float32; seed and position int64. has_sampling: some temperature is above 0. has_filters: some row with such a
    temperature has top_k below vocab or top_p below 1.
    """
    logits = logits.contiguous()
    rows, vocab = logits.shape
    chunks = cdiv(vocab, _CHUNK.value)
    assert vocab <= MAX_VOCAB
    padded = next_power_of_2(chunks)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    picks, places = new(rows, dtype=torch.int64), new(rows, chunks, dtype=torch.int32)
    peaks, kept_masses = new(rows, chunks, dtype=torch.float32), new(rows, chunks, dtype=torch.int64)
    levels = (rows, chunks, _LEVELS.value) if has_filters else (0,)
    counts, masses = new(*levels, dtype=torch.int32), new(*levels, dtype=torch.int64)
    candidate_shape = (rows, _CANDIDATES.value) if has_filters else (0,)
    bits, tokens = new(*candidate_shape, dtype=torch.int32), new(*candidate_shape, dtype=torch.int32)
    size = (vocab, chunks)
    find_chunk_peaks[rows, chunks](peaks, places, logits, *size, num_warps=4)
    if has_sampling:
        sum_chunk_weights[rows, chunks](
            counts, masses, kept_masses, logits, peaks, temperature, min_p, *size, padded, has_filters, num_warps=8
        )
    if has_filters:
        gather_candidates[rows, chunks](
            bits, tokens, counts, masses, logits, peaks, temperature, top_k, top_p, *size, padded, num_warps=8
        )
    shared_tensors = (logits, peaks, places, kept_masses, counts, masses, bits, tokens)
    sampling_tensors = (temperature, top_k, top_p, min_p, seed, position)
    pick_tokens[rows,](picks, *shared_tensors, *sampling_tensors, *size, padded, has_filters, num_warps=8)
    return picks
