"""Quire's linears and norms, which replace a class's own. Norms are recognized by their results, because families use
one name for different arithmetic.
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

from quire.engine.architecture.norm import NormSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import LoadableParameter
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models.transformers_backend.positions import ModuleProxy
from quire.kernels.backend import NO_ADAPTERS, Backend, Linear, LinearContext

_TRIAL_ROWS, _TOLERANCE = 3, 1e-5


class QuireLinear(nn.Module):
    def __init__(
        self,
        linear: FusedLinear,
        module: nn.Linear,
        dtype: torch.dtype,
        device: torch.device,
        context: Callable[[], LinearContext],
        cut: LinearSlice = FULL_LINEAR,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`context` returns the LinearContext of the step's tokens."""
        super().__init__()
        self._packed = linear
        self._context = context
        self._reduce = reduce
        self.out_features, self.in_features = cut.sliced_sizes(module.out_features, module.in_features)
        self.weight = torch.empty(0, dtype=dtype, device=device)
        """Classes read only its dtype and device."""
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output = self._packed.packed_linear(rows.contiguous(), self._context())
        output = output if self._reduce is None else self._reduce(output)
        return output.view(*x.shape[:-1], self.out_features)


class QuireNorm(nn.Module):
    def __init__(self, name: str, size: int, build_context: BuildContext, spec: NormSpec) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._backend = build_context.backend
        self.weights = NormWeights({name: size}, build_context.dtype, spec)
        self.weight = torch.empty(0, dtype=build_context.dtype, device=build_context.device)
        """Empty, like QuireLinear's weight."""
        self.variance_epsilon = self.eps = spec.eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._size).contiguous()
        return self.weights.apply_norm(self._backend, self._name, rows).view(x.shape)


def make_quire_norm(name: str, module: nn.Module, build_context: BuildContext) -> QuireNorm | None:
    """Returns None unless Quire's norm computes the same function."""
    if type(module) is nn.LayerNorm:
        if not module.elementwise_affine or len(module.normalized_shape) != 1:
            return None
        spec = NormSpec(module.eps, is_layer_norm=True, bias=module.bias is not None)
        return QuireNorm(name, module.normalized_shape[0], build_context, spec)
    if not type(module).__name__.endswith("RMSNorm") or {name for name, _ in module.named_parameters()} != {"weight"}:
        return None
    weight = module.weight
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float) or list(module.buffers()):
        return None
    for offset in (0.0, 1.0):
        if _is_numerically_rms_norm(module, len(weight), eps, offset):
            return QuireNorm(name, len(weight), build_context, NormSpec(eps, offset))
    return None


def _is_numerically_rms_norm(module: nn.Module, size: int, eps: float, offset: float) -> bool:
    """True if the module computes x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(size, generator=generator), torch.randn((_TRIAL_ROWS, size), generator=generator) * eps**0.5
    trial: Any = copy.deepcopy(module)
    trial.weight = nn.Parameter(weight, requires_grad=False)
    try:
        output = trial(x)
    except Exception:  # the module takes more than x
        return False
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return (
        isinstance(output, Tensor) and output.shape == x.shape and bool(((output - expected).abs() < _TOLERANCE).all())
    )


def meta_linear_of_conv1d(module: Conv1D) -> nn.Linear:
    """GPT-2's Conv1D has a weight [in, out]."""
    inner, outs = module.weight.shape
    return nn.Linear(inner, outs, device="meta")


def transpose_parameter(parameter: LoadableParameter) -> LoadableParameter:
    if len(parameter.shape) != 2:
        return parameter
    return replace(
        parameter,
        shape=parameter.shape[::-1],
        weight_loader=lambda tensor: parameter.weight_loader(tensor.t().contiguous()),
    )


class BatchInvariantModule(ModuleProxy):
    """Makes rows independent of each other in a module with its own matrix, such as a router."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__(module)
        self._matmul_mode = _PackedMatmulMode(module, backend)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._matmul_mode:
            return self._module(*args, **kwargs)


def has_custom_matmul(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    known = type(module) is nn.Linear or isinstance(module, nn.Embedding | QuireLinear)
    return not known and "weight" in parameters and parameters["weight"].ndim == 2


class _PackedMatmulMode(TorchFunctionMode):
    """Runs Quire's kernel for F.linear with the module's own matrix, in any dtype."""

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        super().__init__()
        self._module, self._backend = module, backend
        self._packed: dict[torch.dtype, tuple[Tensor, Linear]] = {}
        """By dtype: the parameter that was packed, and its linear."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs or (linear := self._packed_linear_or_none(*args[:2])) is None:
            return func(*args, **(kwargs or {}))
        x, bias = args[0], args[2] if len(args) > 2 else None
        rows = linear(x.reshape(-1, x.shape[-1]).contiguous(), NO_ADAPTERS).view(*x.shape[:-1], -1)
        return rows if bias is None else rows + bias

    def _packed_linear_or_none(self, x: Tensor, weight: Tensor) -> Linear | None:
        """If `weight` is the module's matrix converted to another dtype, its values are compared only once per
        dtype.
        """
        parameter = self._module.get_parameter("weight")
        if parameter.shape != weight.shape or self._backend.unsupported_reason(x.device, x.dtype, 2) is not None:
            return None
        cached = self._packed.get(weight.dtype)
        is_known = cached is not None and cached[0] is parameter
        is_same_or_converted = weight.dtype != parameter.dtype or weight.data_ptr() == parameter.data_ptr()
        if not (is_known and is_same_or_converted) and not torch.equal(parameter.to(weight.dtype), weight):
            return None
        if cached is None or not is_known:
            cached = self._packed[weight.dtype] = parameter, self._backend.pack_linear(weight.detach(), None)
        return cached[1]


def find_unreplaced_matmuls(model: nn.Module, called: frozenset[str]) -> list[str]:
    """Returns the matrices that PyTorch still multiplies, so that a row may depend on other rows."""
    names = []
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        if isinstance(module, nn.Embedding) or not (name in called or parent in called):
            continue
        packed = {"weight"} if has_custom_matmul(module) else set()
        matrices = [
            parameter_name for parameter_name, each in module.named_parameters(recurse=False) if each.squeeze().ndim > 1
        ]
        names += [f"{name}.{parameter_name}" for parameter_name in matrices if parameter_name not in packed]
    return names
