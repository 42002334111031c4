"""The gated delta rule (Yang et al., 2024) with what stands around it in Qwen's models, in plain PyTorch: the judge of
the compiled kernels.

Each value head of a sequence has a matrix S [key, value]. A token's q and k, of one key head, are divided by their
lengths, and q by sqrt(key). With decay = exp(rate * softplus(a + shift)) and beta = sigmoid(b), both of the head:

    S = decay * S;  S = S + k (beta * (v - k S))^T;  result = q S

Results are normed (RMSNorm of each head) and multiplied with SiLU of the token's gate z. Whatever the type of what is
given, S and the arithmetic are float32.

Tokens are computed one after the other, so that no bit depends on how a sequence was cut into steps. A slot keeps the
matrices behind the last token that was no guess, and what of guesses the rule takes: a later step applies those that
were right before its own tokens, with the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6
"""Added to the squared lengths of q and k."""


@dataclass(frozen=True, slots=True)
class DeltaRule:
    rate: Tensor
    """[heads] float32, below 0,"""
    shift: Tensor
    """and of the same shape: as above."""
    norm: Tensor
    """[value] float32, the norm's weight,"""
    eps: float
    """and what it adds to the mean of squares."""
    key_heads: int
    """Of as many value heads each, which stand side by side."""
    key: int
    """Numbers of q and of k."""

    @property
    def heads(self) -> int:
        return len(self.rate)

    @property
    def value(self) -> int:
        return len(self.norm)

    @property
    def inputs(self) -> int:
        """Numbers of a token's q, k and v."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def kept(self) -> int:
        """Numbers that are kept of a guess: q, k, v, b and a."""
        return self.inputs + 2 * self.heads


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """What a layer keeps of sequences, by slot."""

    matrices: Tensor
    """[slots, heads, key, value] float32"""
    guesses: Tensor
    """[slots, most guesses, DeltaRule.kept] of the type of what is given: that of position p at p % most guesses"""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Which tokens of a step's sequences are guesses, or were some in the step before."""

    seen: Tensor
    """[S] int32: so many tokens the matrices have seen. Those behind them up to the step's own were guesses, which the
    slot keeps and which turned out right."""
    known: Tensor
    """[S] int32: so many tokens are no guesses; the others, the last ones, may turn out wrong."""


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """A step's sequences, as AttentionMetadata has them."""

    query_start: Tensor
    context_lens: Tensor
    guesses: Guesses | None
    slots: Tensor


def delta_rule(qkv: Tensor, z: Tensor, ba: Tensor, rule: DeltaRule, states: DeltaStates, rows: DeltaRows) -> Tensor:
    """Operations.delta_rule."""
    firsts = rows.context_lens - rows.query_start.diff()
    guesses = rows.guesses or Guesses(firsts, rows.context_lens)
    each = (rows.query_start, rows.context_lens, guesses.seen, guesses.known, rows.slots)
    starts, contexts, seen_lens, known_lens, slots = (tensor.tolist() for tensor in each)
    given, out = torch.cat([qkv, ba], dim=1), torch.empty_like(z)
    for s, (context, *bounds, slot) in enumerate(zip(contexts, seen_lens, known_lens, slots, strict=True)):
        own = slice(starts[s], starts[s + 1])
        found = _row(given[own], rule, states, slot, context, *bounds)
        out[own] = torch.stack([_normed(each, gates, rule) for each, gates in zip(found, z[own], strict=True)])
    return out


def _row(
    given: Tensor, rule: DeltaRule, states: DeltaStates, slot: int, context: int, seen: int, known: int
) -> list[Tensor]:
    """Results [heads, value] of the last tokens of a sequence of `context` tokens, `known` of which are no
    guesses; the matrices have seen the first `seen`."""
    first, most = context - len(given), states.guesses.shape[1]
    stop = min(max(known, seen), context)
    if not 0 <= first - seen <= most or context - stop > most:
        raise IndexError("more guesses than a slot keeps")
    before = [states.guesses[slot, at % most] for at in range(seen, first)]
    matrix = states.matrices[slot] if first else torch.zeros_like(states.matrices[slot])
    found = []
    for at, numbers in enumerate([*before, *given], seen):
        if at == stop:
            states.matrices[slot] = matrix
        q, k, v, decay, beta = _taken(numbers, rule)
        matrix = matrix * decay[:, None, None]
        delta = beta[:, None] * (v - (matrix * k[:, :, None]).sum(1))
        matrix = matrix + k[:, :, None] * delta[:, None]
        if at >= first:
            found.append((matrix * q[:, :, None]).sum(1))
    if stop == context:
        states.matrices[slot] = matrix
    for at in range(max(stop, first), context):
        states.guesses[slot, at % most] = given[at - first]
    return found


def _taken(given: Tensor, rule: DeltaRule) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [heads, key], v [heads, value], decay and beta [heads] of what a token gives. One token at a time: PyTorch's
    functions of many numbers at once give bits that depend on how many these are."""
    wide = given.to(torch.float64 if given.dtype == torch.float64 else torch.float32)
    keys = rule.key_heads * rule.key
    q, k, v, b, a = wide.split([keys, keys, rule.heads * rule.value, rule.heads, rule.heads])
    group = rule.heads // rule.key_heads
    q, k = (each.view(rule.key_heads, rule.key) for each in (q, k))
    q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPSILON) for each in (q, k))
    q, k = (each.repeat_interleave(group, dim=0) for each in (q * rule.key**-0.5, k))
    decay = torch.exp(rule.rate.to(wide.dtype) * F.softplus(a + rule.shift.to(wide.dtype)))
    return q, k, v.view(rule.heads, rule.value), decay, b.sigmoid()


def _normed(found: Tensor, z: Tensor, rule: DeltaRule) -> Tensor:
    factor = torch.rsqrt(found.pow(2).mean(-1, keepdim=True) + rule.eps)
    normed = found * factor * rule.norm.to(found.dtype) * F.silu(z.to(found.dtype).view(found.shape))
    return normed.flatten().to(z.dtype)
