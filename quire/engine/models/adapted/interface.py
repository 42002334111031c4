"""Our names among transformers' interfaces: what a class calls for attention, for masks and for experts.

Each calls what the module carries that asks: `Attending` on every module of a model, `Mixing` on those with experts. So
nothing is kept outside of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "quire"
_ATTENDING, _MIXING, _ALLOWED = "quire_attending", "quire_mixing", "quire_allowed"

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""(batch, head, positions of queries, positions of keys) to whether these see those."""


class AttentionCall(NamedTuple):
    """What a class gives its attention."""

    module: nn.Module
    query: Tensor
    """[1, H, T, D];"""
    key: Tensor
    """[1, K, T, D],"""
    value: Tensor
    """and so, maybe of another D."""
    mask: Tensor | None
    given: Mapping[str, Any]
    """What else the class says of it, by transformers' names."""


Attending = Callable[[AttentionCall], Tensor]
"""To [1, T, H, D of the value]."""
Mixing = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, hidden], the experts chosen for each token [T, k], their weights [T, k]) to [T, hidden]."""


def register() -> None:
    """Make them known to transformers; once or often."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _mix)


def attend_by(model: nn.Module, attending: Attending) -> None:
    """Let it compute all attention of a model."""
    for module in model.modules():
        module.__dict__[_ATTENDING] = attending


def mix_by(module: nn.Module, mixing: Mixing) -> None:
    """Let it compute the experts of a module."""
    module.__dict__[_MIXING] = mixing


def allowed_by(mask: Tensor) -> MaskFunction | None:
    """What a mask that a class has made allows; None: it is not as it was made."""
    found: MaskFunction | None = mask.__dict__.get(_ALLOWED)
    return found


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    attending: Attending = module.__dict__[_ATTENDING]
    return attending(AttentionCall(module, query, key, value, attention_mask, given)), None


def _mask(*, device: torch.device, mask_function: MaskFunction, **given: Any) -> Tensor | None:
    """No mask: the pages know what is seen. On the meta device one that tells what it allows."""
    if torch.device(device).type != "meta":
        return None
    mask = torch.empty((1, 1, 1, 1), dtype=torch.bool, device="meta")
    mask.__dict__[_ALLOWED] = mask_function
    return mask


def _mix(module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mixing: Mixing | None = module.__dict__.get(_MIXING)
    if mixing is not None:
        return mixing(x, chosen, weights)
    mixed: Tensor = batched_mm_experts_forward(module, x, chosen, weights)
    return mixed
