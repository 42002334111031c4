"""Kernels that change logits in place. The host does not wait. HostLogitsProcessor in engine/worker/sampling/sampler.py
defines the results.

`tokens` [slots, max tokens] int32 are each slot's token ids. `slot` and `position` [R] are a row's slot and number of
tokens so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.gpu.triton_launch_sizes import cdiv

_BLOCK = tl.constexpr(1024)
_PROMPT = tl.constexpr(1 << 30)
"""Bit of a token's count that is set if the prompt has the token. The bits below count the token in the output."""


@triton.jit(do_not_specialize=["stride"])
def count_tokens(counts, tokens, slots, positions, num_prompts, stride, vocab):
    """Count each row's tokens in counts [R, vocab] int32, which must be 0 before."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < tl.load(positions + row)
    prompt = i < tl.load(num_prompts + row)
    token = tl.load(tokens + tl.load(slots + row) * stride + i, mask=inside, other=0)
    at = counts + row * vocab + token
    tl.atomic_or(at, tl.full([_BLOCK], _PROMPT, tl.int32), mask=inside & prompt, sem="relaxed")
    tl.atomic_add(at, tl.full([_BLOCK], 1, tl.int32), mask=inside & (i >= tl.load(num_prompts + row)), sem="relaxed")


@triton.jit
def apply_penalties(logits, counts, rows, repetitions, presences, frequencies, vocab):
    """Apply penalties to `rows` [P] of logits, with counts [P, vocab]."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = token < vocab
    count = tl.load(counts + index * vocab + token, mask=inside, other=0)
    at = logits + tl.load(rows + index) * vocab + token
    value = tl.load(at, mask=inside & (count > 0), other=0.0)
    repetition = tl.load(repetitions + index)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    often = count & (_PROMPT - 1)
    off = tl.load(presences + index) + tl.load(frequencies + index) * often.to(tl.float32)
    tl.store(at, tl.where(often > 0, value - off, value), mask=inside & (count > 0))


@triton.jit(do_not_specialize=["number"])
def add_at(logits, rows, tokens, values, number, vocab):
    """Compute logits[rows[i], tokens[i]] += values[i] if the token is in the vocabulary. No two i may have the same row
    and token.
    """
    i = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    token = tl.load(tokens + i, mask=i < number, other=-1)
    inside = (token >= 0) & (token < vocab)
    at = logits + tl.load(rows + i, mask=inside, other=0) * vocab + token
    value = tl.load(at, mask=inside, other=0.0) + tl.load(values + i, mask=inside, other=0.0)
    tl.store(at, value, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def ban_words(logits, tokens, rows, slots, positions, words, ends, stride, vocab):
    """Set a word's last token to -inf if the row ends with the word's other tokens. `words` has all words' tokens, and
    ends [words + 1] bounds each word. rows, slots and positions are [words].
    """
    index = tl.program_id(0)
    begin, last = tl.load(ends + index), tl.load(ends + index + 1) - 1
    tail = tokens + tl.load(slots + index) * stride + tl.load(positions + index) - (last - begin)
    matches = 1
    for i in range(last - begin):
        matches &= (tl.load(tail + i) == tl.load(words + begin + i)).to(tl.int32)
    if (matches != 0) & (tl.load(words + last) < vocab):
        tl.store(logits + tl.load(rows + index) * vocab + tl.load(words + last), float("-inf"))


def penalize_tokens(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    slot: Tensor,
    position: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    longest: int,
) -> None:
    """Apply penalties to `rows` [P]. `longest` is the largest position. Positions and numbers are int64, penalties
    float32.
    """
    vocab, number = logits.shape[1], len(rows)
    counts = torch.zeros((number, vocab), dtype=torch.int32, device=logits.device)
    grid = (number, cdiv(longest, _BLOCK.value))
    count_tokens[grid](counts, tokens, slot, position, num_prompt, tokens.stride(0), vocab, num_warps=4)
    grid = (number, cdiv(vocab, _BLOCK.value))
    apply_penalties[grid](logits, counts, rows, repetition, presence, frequency, vocab, num_warps=4)


def add_logit_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add values, float32, to logits[rows, tokens]. No (row, token) pair may occur twice."""
    grid = (cdiv(len(rows), _BLOCK.value),)
    add_at[grid](logits, rows, tokens, values, len(rows), logits.shape[1], num_warps=4)


def ban_bad_words(
    logits: Tensor, tokens: Tensor, rows: Tensor, slot: Tensor, position: Tensor, words: Tensor, ends: Tensor
) -> None:
    """Ban the last token of word words[ends[w] : ends[w + 1]] in rows[w] if the row ends with the word's
    other tokens.
    """
    ban_words[len(rows),](
        logits, tokens, rows, slot, position, words, ends, tokens.stride(0), logits.shape[1], num_warps=1
    )
