"""The gated delta rule in the type that it is given: transformers computes it in float32 even in a model of float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NAME = "torch_chunk_gated_delta_rule"


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Yang et al., 2024, "Gated Delta Networks", token by token; q and k get length 1. [batch, tokens, heads, D]."""
    query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    each_key = value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(each_key, 2) for each in (query * query.shape[-1] ** -0.5, key))
    state, out = value.new_zeros(value.shape[0], *key.shape[2:], value.shape[3]), torch.zeros_like(value)
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        lacks = (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], lacks)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, query[:, t])
    return out, None


@contextmanager
def exact_delta_rule(made_by: type[PreTrainedModel]) -> Iterator[None]:
    """Models of the class compute meanwhile by this rule, where they have one."""
    module = sys.modules[made_by.__module__]
    with patch.object(module, _NAME, gated_delta_rule) if hasattr(module, _NAME) else nullcontext():
        yield
