"""Modules of ours in the place of a class's, where they are the same function: linears and norms.

That a norm is the same is tried, not believed: families have norms of one name and other arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter
from quire.engine.layers.part import BuildContext
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.engine.models.adapted.positions import StandIn
from quire.kernels.backend import NO_ADAPTERS, Backend, Linear, LinearContext

_ROWS, _CLOSE = 3, 1e-5


class OurLinear(nn.Module):
    """An nn.Linear whose weights a scheme packs."""

    def __init__(
        self,
        linear: JoinedLinear,
        like: nn.Linear,
        dtype: torch.dtype,
        device: torch.device,
        context: Callable[[], LinearContext],
        cut: Cut = WHOLE_LINEAR,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`context`: of the tokens of a step, which are its rows where it has adapters. `cut`: what of it a rank has;
        `total`: what adds up the ranks' results, where these are parts."""
        super().__init__()
        self._packed, self._context, self._total = linear, context, total
        self.out_features, self.in_features = cut.sizes(like.out_features, like.in_features)
        self.weight = torch.empty(0, dtype=dtype, device=device)
        """None of it: classes ask a weight for its type and its device."""
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        made = self._packed.packed(rows.contiguous(), self._context())
        made = made if self._total is None else self._total(made)
        return made.view(*x.shape[:-1], self.out_features)


class OurNorm(nn.Module):
    """A norm over the last axis."""

    def __init__(self, name: str, size: int, making: BuildContext, spec: NormSpec) -> None:
        super().__init__()
        self._name, self._size, self._backend = name, size, making.backend
        self.weights = NormWeights({name: size}, making.dtype, spec)
        self.weight = torch.empty(0, dtype=making.dtype, device=making.device)
        """As OurLinear's."""
        self.variance_epsilon = self.eps = spec.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._size).contiguous()
        return self.weights.norm(self._backend, self._name, rows).view(x.shape)


def our_norm(name: str, module: nn.Module, making: BuildContext) -> OurNorm | None:
    """Ours in the place of a norm on the meta device; None where it is not the same function."""
    if type(module) is nn.LayerNorm:
        if not module.elementwise_affine or len(module.normalized_shape) != 1:
            return None
        spec = NormSpec(module.eps, centred=True, bias=module.bias is not None)
        return OurNorm(name, module.normalized_shape[0], making, spec)
    if not type(module).__name__.endswith("RMSNorm") or {name for name, _ in module.named_parameters()} != {"weight"}:
        return None
    weight = module.weight
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float) or list(module.buffers()):
        return None
    for offset in (0.0, 1.0):
        if _is_rms_norm(module, len(weight), eps, offset):
            return OurNorm(name, len(weight), making, NormSpec(eps, offset))
    return None


def _is_rms_norm(module: nn.Module, size: int, eps: float, offset: float) -> bool:
    """Whether a norm computes x / sqrt(mean(x^2) + eps) * (weight + offset), by numbers."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(size, generator=generator), torch.randn((_ROWS, size), generator=generator) * eps**0.5
    tried: Any = copy.deepcopy(module)
    tried.weight = nn.Parameter(weight, requires_grad=False)
    try:
        found = tried(x)
    except Exception:  # it takes more than x
        return False
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return isinstance(found, Tensor) and found.shape == x.shape and bool(((found - wanted).abs() < _CLOSE).all())


def transposed(module: Conv1D) -> nn.Linear:
    """The linear that GPT-2's Conv1D is, on the meta device; its weight is stored [in, out]."""
    inner, outs = module.weight.shape
    return nn.Linear(inner, outs, device="meta")


def turned(parameter: Parameter) -> Parameter:
    """Of a matrix that a checkpoint has transposed."""
    if len(parameter.shape) != 2:
        return parameter
    return replace(parameter, shape=parameter.shape[::-1], put=lambda tensor: parameter.put(tensor.t().contiguous()))


class RowsApart(StandIn):
    """A module of a class that multiplies by its own matrices, as routers do: by our linears, so that no row's bits
    depend on the others."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__(module)
        self._products = _Products(module, backend)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._products:
            return self._module(*args, **kwargs)


def multiplies(module: nn.Module) -> bool:
    """Whether it has a matrix of its own, and is neither a linear nor a table."""
    own = dict(module.named_parameters(recurse=False))
    known = type(module) is nn.Linear or isinstance(module, nn.Embedding | OurLinear)
    return not known and "weight" in own and own["weight"].ndim == 2


class _Products(TorchFunctionMode):
    """In its context F.linear with a module's own matrix, in any type, is ours."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        self._module, self._backend = module, backend
        self._packed: dict[torch.dtype, tuple[Tensor, Linear]] = {}
        """By type, with the parameter that it was made of."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs or (linear := self._linear(*args[:2])) is None:
            return func(*args, **(kwargs or {}))
        x, bias = args[0], args[2] if len(args) > 2 else None
        rows = linear(x.reshape(-1, x.shape[-1]).contiguous(), NO_ADAPTERS).view(*x.shape[:-1], -1)
        return rows if bias is None else rows + bias

    def _linear(self, x: Tensor, weight: Tensor) -> Linear | None:
        """None where it is another matrix, or of a type that the backend does not take."""
        own = self._module.get_parameter("weight")
        if own.shape != weight.shape or self._backend.cannot_serve(x.device, x.dtype, 2) is not None:
            return None
        known = self._packed.get(weight.dtype)
        if known is None or known[0] is not own:
            if not torch.equal(own.to(weight.dtype), weight):
                return None
            known = self._packed[weight.dtype] = own, self._backend.pack_linear(weight.detach(), None)
        return known[1]


def foreign_products(model: nn.Module, called: frozenset[str]) -> list[str]:
    """The matrices that a class multiplies by itself, once ours have taken the place of others: PyTorch's products, in
    which a row's bits may depend on the others. `called`: the modules that the class calls at all."""
    found = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.Embedding) or not (name in called or parent in called):
            continue
        ours = {"weight"} if multiplies(module) else set()
        matrices = [own for own, each in module.named_parameters(recurse=False) if each.squeeze().ndim > 1]
        found += [f"{name}.{own}" for own in matrices if own not in ours]
    return found
