"""The gated delta rule and the selective scan in their input's dtype: transformers computes them in float32 even in a
float64 model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes a second


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Yang et al., 2024, "Gated Delta Networks", token by token; q and k get length 1. [batch, tokens, heads, D]. g may
    have one number per head, or one per key channel (Kimi Delta Attention).
    """
    query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    each_key = value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(each_key, 2) for each in (query * query.shape[-1] ** -0.5, key))
    state, out = value.new_zeros(value.shape[0], *key.shape[2:], value.shape[3]), torch.zeros_like(value)
    for t in range(value.shape[1]):
        decay = g[:, t].exp()[..., None]
        state = state * (decay if g.ndim == 4 else decay[..., None])
        lacks = (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], lacks)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, query[:, t])
    return out, None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    **_: Any,
) -> Tensor:
    """Dao and Gu, 2024, "Transformers are SSMs", token by token. x [batch, tokens, heads, D], b and c [batch, tokens,
    groups, N]."""
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (b, c))
    step = torch.nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
    state, out = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = state * (step[:, t] * rate).exp()[..., None, None]
        state = state + torch.einsum("bhp,bhn->bhpn", step[:, t, :, None] * x[:, t], b[:, t])
        out[:, t] = torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + D[:, None] * x[:, t]
    return out


_RULES = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": selective_scan,
}


@contextmanager
def exact_rules(made_by: type[PreTrainedModel]) -> Iterator[None]:
    """Models of the class use these rules within the context, if they have one."""
    module = sys.modules[made_by.__module__]
    with ExitStack() as stack:
        for name, rule in _RULES.items():
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, rule))
        yield
