"""Calls delta_rule.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu import native
from quire.kernels.recurrent.delta_rule import DeltaRule, DeltaStates


def check_delta(rule: DeltaRule, states: DeltaStates, dtype: torch.dtype) -> None:
    """Raise TypeError, or ValueError, for what the kernel does not take."""
    wide = {"rate": rule.rate, "shift": rule.shift, "norm": rule.norm, "matrices": states.matrices}
    if wrong := [name for name, each in wide.items() if each.dtype != torch.float32]:
        raise TypeError(f"a delta rule's {wrong[0]} must be float32")
    if states.guesses.dtype != dtype:
        raise TypeError(f"guesses of {states.guesses.dtype} cannot serve {dtype}")
    if not all(each.is_contiguous() for each in (*wide.values(), states.guesses)):
        raise ValueError("what a delta rule reads and keeps must be contiguous")
    if rule.value % 16 or rule.key % 2 or rule.heads % rule.key_heads:
        raise ValueError(
            "a value must have a multiple of 16 numbers, a key an even number, and key heads as many values"
        )


def pointers(rule: DeltaRule, out: object, states: DeltaStates) -> tuple[object, ...]:
    """What the kernel takes between what tokens give and the step's rows."""
    return rule.rate, rule.shift, rule.norm, out, states.matrices, states.guesses


def sizes(rule: DeltaRule, states: DeltaStates) -> tuple[int, int, int, int, int, float]:
    return rule.key_heads, rule.heads, rule.key, rule.value, states.guesses.shape[1], rule.eps


def computed(
    library: native.Native,
    given: tuple[Tensor, Tensor, Tensor],
    rule: DeltaRule,
    states: DeltaStates,
    metadata: AttentionMetadata,
) -> Tensor:
    qkv, z, ba = (each.contiguous() for each in given)
    check_delta(rule, states, qkv.dtype)
    out, slots = torch.empty_like(z), metadata.state_slots
    assert slots is not None
    guesses = metadata.guesses
    bounds = (None, None) if guesses is None else (guesses.seen, guesses.known)
    where = (metadata.query_start, metadata.context_lens, *bounds, slots)
    tensors = (qkv, z, ba, *pointers(rule, out, states), *where)
    addresses = [None if each is None else each.data_ptr() for each in tensors]
    counts = (len(states.matrices), len(slots), *sizes(rule, states), torch.get_num_threads())
    if library.delta_rule[qkv.dtype](*addresses, *counts):
        raise IndexError("there is no such slot, or there are more guesses than it keeps")
    return out
