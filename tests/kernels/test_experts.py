"""Mixtures of experts: results, which experts are read, and that a row's bits depend only on the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.engine.layers.schemes.online_quantization import quantize_int4, quantize_int8
from quire.kernels.backend import NO_ADAPTERS, Backend, Linear
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.decoder.compiled_moe import CompiledMoE
from quire.kernels.parameters.activation import ClampedSwiGLU
from quire.kernels.parameters.routing import Routing
from quire.kernels.quantized_tensors import GroupedWeight
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import MoEComponents
from tests.kernels.ragged import error

HIDDEN, INNER, COUNT, CHOSEN = 64, 96, 7, 3
CLAMP = ClampedSwiGLU(1.702, 1.5)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def weights(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    def draw(*shape: int, size: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(dtype)

    return {
        "router": draw(COUNT, HIDDEN, size=HIDDEN**-0.5),
        "router_bias": draw(COUNT, size=0.5),
        "gate_up": draw(COUNT, 2 * INNER, HIDDEN, size=1.5 * HIDDEN**-0.5),
        "gate_up_bias": draw(COUNT, 2 * INNER, size=0.5),
        "down": draw(COUNT, HIDDEN, INNER, size=INNER**-0.5),
        "down_bias": draw(COUNT, HIDDEN, size=0.5),
    }


def experts(
    backend: Backend,
    given: dict[str, Tensor],
    *,
    normalized: bool = True,
    clamp: ClampedSwiGLU | None = CLAMP,
    form: Callable[[Tensor], GroupedWeight] | None = None,
) -> MoEComponents:
    def linear(name: str, expert: int) -> Linear:
        weight, bias = given[name][expert], given[f"{name}_bias"][expert]
        if form is None:
            return backend.pack_linear(weight, bias)
        return backend.pack_quantized([form(weight)], bias, dtype=weight.dtype)

    router = backend.pack_linear(given["router"], given["router_bias"], wide=True)
    parts = [[linear(name, expert) for expert in range(COUNT)] for name in ("gate_up", "down")]
    return MoEComponents(router, *parts, Routing(CHOSEN, is_normalized=normalized), clamp)


def wanted(x: Tensor, given: dict[str, Tensor], *, normalized: bool, clamp: ClampedSwiGLU | None) -> Tensor:
    """The mixture in float64, token by token."""
    w = {name: tensor.double() for name, tensor in given.items()}
    rows = []
    for row in x.double():
        scores = w["router"] @ row + w["router_bias"]
        chosen = scores.topk(CHOSEN).indices
        shares = scores[chosen].softmax(-1) if normalized else scores.softmax(-1)[chosen]
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            gate, up = (w["gate_up"][expert] @ row + w["gate_up_bias"][expert]).chunk(2)
            if clamp is None:
                gated = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
                gated = gate * (1 / (1 + (-clamp.alpha * gate).exp())) * (up + 1)
            total += share * (w["down"][expert] @ gated + w["down_bias"][expert])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("normalized", "clamp"), [(True, CLAMP), (False, None)])
def test_moe_output_is_weighted_sum_of_experts(
    cpu: CpuBackend, normalized: bool, clamp: ClampedSwiGLU | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    tensors, x = weights(dtype, generator), torch.randn((50, HIDDEN), generator=generator).to(dtype)
    expected = wanted(x, tensors, normalized=normalized, clamp=clamp)
    for backend in (cpu, ReferenceBackend()):
        moe = backend.make_moe(experts(backend, tensors, normalized=normalized, clamp=clamp))
        assert error(moe(x), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moe_applies_separate_router_input_and_expert_scales(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Computed by hand, with GELU gates: each expert's output is scaled by its share and its own scale."""
    tensors = weights(dtype, generator)
    x, routed = (torch.randn((40, HIDDEN), generator=generator).to(dtype) for _ in range(2))
    factors, w = 0.5 + torch.rand(COUNT, generator=generator), {name: each.double() for name, each in tensors.items()}
    rows = []
    for row, by in zip(x.double(), routed.double(), strict=True):
        scores = w["router"] @ by + w["router_bias"]
        chosen, total = scores.topk(CHOSEN).indices, torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen.tolist(), scores[chosen].softmax(-1), strict=True):
            gate, up = (w["gate_up"][expert] @ row + w["gate_up_bias"][expert]).chunk(2)
            gated = torch.nn.functional.gelu(gate, approximate="tanh") * up
            total += share * factors[expert].double() * (w["down"][expert] @ gated + w["down_bias"][expert])
        rows.append(total)
    for backend in (cpu, ReferenceBackend()):
        components = replace(experts(backend, tensors, clamp=None), expert_scales=factors, has_gelu_gates=True)
        assert error(backend.make_moe(components)(x, routed), torch.stack(rows)) < TOLERANCE[dtype]


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["whole", "int8", "int4"])
def test_moe_row_bits_do_not_depend_on_batch_or_threads(
    cpu: CpuBackend, form: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    forms = {"whole": None, "int8": quantize_int8, "int4": lambda weight: quantize_int4(weight, cpu)}
    tensors, x = weights(dtype, generator), torch.randn((300, HIDDEN), generator=generator).to(dtype)
    moe = cpu.make_moe(experts(cpu, tensors, form=forms[form]))
    whole = moe(x)
    for rows in ([0], [299], [17, 4], list(range(30, 61)), list(range(299, -1, -1))):
        assert torch.equal(moe(x[rows]), whole[rows])
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(moe(x), whole)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moe_does_not_read_unrouted_experts(cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator) -> None:
    tensors, x = weights(dtype, generator), torch.randn((4, HIDDEN), generator=generator).to(dtype)
    tensors["router_bias"][:] = torch.tensor([9.0, 0.0, 9.0, 0.0, 9.0, 0.0, 0.0])
    for expert in (1, 3, 5, 6):
        tensors["gate_up"][expert] = tensors["down"][expert] = torch.nan
    for backend in (cpu, ReferenceBackend()):
        assert backend.make_moe(experts(backend, tensors))(x).isfinite().all()


def test_moe_breaks_ties_by_index_and_propagates_nan(cpu: CpuBackend, generator: torch.Generator) -> None:
    tensors, x = weights(torch.float32, generator), torch.randn((3, HIDDEN), generator=generator)
    tensors["router"][:] = tensors["router_bias"][:] = 0
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("gate_up", "down"):
        first[name][CHOSEN:] = torch.nan
    for backend in (cpu, ReferenceBackend()):
        assert torch.equal(backend.make_moe(experts(backend, first))(x), backend.make_moe(experts(backend, tensors))(x))
    tensors["router"][2] = torch.nan
    assert cpu.make_moe(experts(cpu, tensors))(x).isnan().all()


def test_moe_rejects_wrong_input_and_falls_back_for_plain_router(cpu: CpuBackend, generator: torch.Generator) -> None:
    moe = cpu.make_moe(experts(cpu, weights(torch.bfloat16, generator)))
    assert isinstance(moe, CompiledMoE)
    for x in (torch.zeros(2, HIDDEN + 2, dtype=torch.bfloat16), torch.zeros(2, HIDDEN)):
        with pytest.raises(TypeError, match="cannot take"):
            moe(x)
    components = experts(cpu, tensors := weights(torch.bfloat16, generator))
    plain = MoEComponents(
        lambda x, context: components.router(x, NO_ADAPTERS),
        components.gate_up,
        components.down,
        Routing(CHOSEN),
        CLAMP,
    )
    x = torch.randn((9, HIDDEN), generator=generator).bfloat16()
    assert not isinstance(cpu.make_moe(plain), CompiledMoE)
    assert error(cpu.make_moe(plain)(x), wanted(x, tensors, normalized=True, clamp=CLAMP)) < TOLERANCE[torch.bfloat16]
