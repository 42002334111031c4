"""Registers Quire in transformers' attention, mask and experts interfaces. Modules carry the functions to call, so
there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

INTERFACE_NAME = "quire"
_ATTENTION_KEY = "quire_attending"
_EXPERTS_KEY = "quire_mixing"
_MASK_KEY = "quire_allowed"

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""Maps (batch, head, query positions, key positions) to a mask."""


class AttentionCall(NamedTuple):
    module: nn.Module
    query: Tensor
    """[1, H, T, D]."""
    key: Tensor
    """[1, K, T, D]."""
    value: Tensor
    """[1, K, T, D of the value]."""
    mask: Tensor | None
    kwargs: Mapping[str, Any]


AttentionFunction = Callable[[AttentionCall], Tensor]
"""Returns [1, T, H, D of the value]."""
ExpertsFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps (x [T, hidden], expert ids [T, k], weights [T, k]) to [T, hidden]."""


def register_interfaces() -> None:
    ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, _run_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, _make_probe_mask)
    ALL_EXPERTS_FUNCTIONS.register(INTERFACE_NAME, _run_experts)


def set_attention_function(model: nn.Module, function: AttentionFunction) -> None:
    for module in model.modules():
        module.__dict__[_ATTENTION_KEY] = function


def set_experts_function(module: nn.Module, function: ExpertsFunction) -> None:
    module.__dict__[_EXPERTS_KEY] = function


def mask_function_of(mask: Tensor) -> MaskFunction | None:
    """Returns None if the class changed the mask."""
    function: MaskFunction | None = mask.__dict__.get(_MASK_KEY)
    return function


def _run_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    function: AttentionFunction = module.__dict__[_ATTENTION_KEY]
    return function(AttentionCall(module, query, key, value, attention_mask, kwargs)), None


def _make_probe_mask(*, device: torch.device, mask_function: MaskFunction, **kwargs: Any) -> Tensor | None:
    """Returns None except on meta devices, because paged attention needs no mask."""
    if torch.device(device).type != "meta":
        return None
    mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device="meta")
    mask.__dict__[_MASK_KEY] = mask_function
    return mask


def _run_experts(module: nn.Module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    function: ExpertsFunction | None = module.__dict__.get(_EXPERTS_KEY)
    if function is not None:
        return function(x, expert_ids, weights)
    mixed: Tensor = batched_mm_experts_forward(module, x, expert_ids, weights)
    return mixed
