"""Mixtures of experts in Triton against float64 and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.engine.layers.schemes.online_quantization import quantize_int4, quantize_int8
from quire.kernels.backend import MoEComponents
from quire.kernels.gpu.experts import grouped_moe
from quire.kernels.gpu.experts.grouped_moe import GroupedMoE, route_on_device, sort_rows_by_expert
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.parameters.activation import Activation
from quire.kernels.parameters.routing import Routing
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import choose_experts
from tests.kernels.ragged import error
from tests.kernels.test_experts import CHOSEN, CLAMP, COUNT, HIDDEN, INNER, TOLERANCE, experts, wanted, weights

FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of MXFP4 codes, doubled."""


def to_device(given: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in given.items()}


def mxfp4(weight: Tensor) -> GroupedWeight:
    """A weight in MXFP4 with the shape of `weight` and other values."""
    codes = (weight.float().view(torch.int32) >> 7).to(torch.uint8)[:, ::2].contiguous()
    scales = torch.full((len(weight), weight.shape[1] // 32), 2.0**-6, device=weight.device)
    return GroupedWeight(codes, scales, code_values=FP4)


def fp8(weight: Tensor) -> Float8Weight:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return Float8Weight((weight.float() / scales).to(torch.float8_e4m3fn), scales, (1, weight.shape[1]))


FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int4": lambda weight: quantize_int4(weight, ReferenceBackend()),
    "int8": quantize_int8,
    "mxfp4": mxfp4,
    "fp8": fp8,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("normalized", "clamp"), [(True, CLAMP), (False, None)])
@pytest.mark.parametrize("rows", [1, 50])
def test_moe_output_is_weighted_sum_of_experts(
    device: torch.device, dtype: torch.dtype, normalized: bool, clamp: object, rows: int, generator: torch.Generator
) -> None:
    tensors, x = weights(dtype, generator), torch.randn((rows, HIDDEN), generator=generator).to(dtype)
    judge = wanted(x, tensors, normalized=normalized, clamp=clamp)
    backend = TritonBackend()
    moe = backend.make_moe(experts(backend, to_device(tensors, device), normalized=normalized, clamp=clamp))
    assert isinstance(moe, GroupedMoE)
    assert error(moe(x.to(device)).cpu(), judge) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 90])
def test_quantized_moe_matches_dequantized_experts(
    device: torch.device, form: str, rows: int, generator: torch.Generator
) -> None:
    tensors, x = weights(torch.bfloat16, generator), torch.randn((rows, HIDDEN), generator=generator).bfloat16()
    backend, judge = TritonBackend(), dict(tensors)
    for name in ("gate_up", "down"):
        judge[name] = torch.stack([FORMS[form](each).dequantize() for each in tensors[name]])
    moe = backend.make_moe(experts(backend, to_device(tensors, device), form=FORMS[form]))
    assert isinstance(moe, GroupedMoE)
    expected = wanted(x, judge, normalized=True, clamp=CLAMP)
    assert error(moe(x.to(device)).cpu(), expected) < TOLERANCE[torch.bfloat16]


ROUTINGS = [
    Routing(CHOSEN, "sigmoid", normalizer_eps=1e-9, scale=2.5),
    Routing(2, num_groups=7, top_k_groups=3),
    Routing(2, "mixer", jitter=0.1),
    Routing(2, "sigmoid", is_normalized=False, weights_inputs=True),
    Routing(CHOSEN, softcap=2.0, is_normalized=False),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_moe_with_every_routing_matches_reference(
    device: torch.device, routing: Routing, generator: torch.Generator
) -> None:
    tensors, x = weights(torch.float32, generator), torch.randn((20, HIDDEN), generator=generator)
    correction = torch.randn(COUNT, generator=generator) if routing.score_function != "mixer" else None

    def mixed(backend: ReferenceBackend, where: torch.device) -> Tensor:
        of: MoEComponents = experts(backend, to_device(tensors, where))
        there = None if correction is None else correction.to(where)
        return backend.make_moe(replace(of, routing=routing, score_correction_bias=there))(x.to(where)).cpu()

    assert (
        error(mixed(TritonBackend(), device), mixed(ReferenceBackend(), torch.device("cpu"))) < TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("count", [7, 128])
def test_route_on_device_equals_choose_experts(
    count: int, corrected: bool, device: torch.device, generator: torch.Generator
) -> None:
    """The order is that of `choose_experts`: the first of equal scores, each expert once, also if scores are NaN."""
    scores = torch.randn((9, count), generator=generator).mul(4).round().div(4)  # many are equal
    scores[3], scores[4, 2], scores[5] = -torch.inf, torch.inf, 0.0
    scores[5, ::2] = -0.0
    scores[6, 5] = torch.nan
    correction = torch.randn(count, generator=generator).round() if corrected else None
    for routing in (Routing(4), Routing(4, "sigmoid", normalizer_eps=1e-9, scale=2.5), Routing(3, is_normalized=False)):
        of = MoEComponents(
            lambda x, _: x, [], [], routing, score_correction_bias=None if correction is None else correction.to(device)
        )
        chosen, shares, found = route_on_device(of, scores.to(device))
        expected, weights = choose_experts(scores, replace(of, score_correction_bias=correction))
        assert found == count
        numbers = torch.arange(9)[scores.isfinite().all(1)]
        assert torch.equal(chosen.cpu()[numbers], expected[numbers])
        torch.testing.assert_close(shares.cpu()[numbers], weights[numbers], rtol=1e-5, atol=1e-7)
        assert all(len(set(row)) == routing.top_k for row in chosen.tolist())
        assert ((chosen >= 0) & (chosen < count)).all()
        assert not shares.cpu()[6].isfinite().all()


def test_dry_run_reads_no_expert_scale_outside(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has written the chosen experts then, and PyTorch's indexing of a wild one ends the CUDA context."""

    class NotLaunched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: None

    monkeypatch.setattr(grouped_moe.kernels, "choose_experts", NotLaunched())
    dirty = torch.full((50, 4), 2**40, device=device)  # memory that is taken next
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: dirty[: shape[0][0], : shape[0][1]].to(dtype))
    of = MoEComponents(lambda x, _: x, [], [], Routing(4), expert_scales=torch.ones(7, device=device))
    chosen, _, _ = route_on_device(of, torch.zeros((9, 7), device=device))
    assert not chosen.any()


def test_ungated_moe_matches_reference(device: torch.device, generator: torch.Generator) -> None:
    tensors, x = weights(torch.float32, generator), torch.randn((9, HIDDEN), generator=generator)
    tensors["gate_up"], tensors["gate_up_bias"] = (
        tensors["gate_up"][:, :INNER].contiguous(),
        tensors["gate_up_bias"][:, :INNER],
    )

    def mixed(backend: ReferenceBackend, where: torch.device) -> Tensor:
        of = replace(experts(backend, to_device(tensors, where)), activation=Activation("relu2"), clamped_swiglu=None)
        return backend.make_moe(of)(x.to(where)).cpu()

    assert (
        error(mixed(TritonBackend(), device), mixed(ReferenceBackend(), torch.device("cpu"))) < TOLERANCE[torch.float32]
    )


def test_deterministic_moe_row_bits_do_not_depend_on_batch(device: torch.device, generator: torch.Generator) -> None:
    tensors, x = weights(torch.bfloat16, generator), torch.randn((150, HIDDEN), generator=generator).bfloat16()
    backend = TritonBackend(deterministic=True)
    moe, x = backend.make_moe(experts(backend, to_device(tensors, device))), x.to(device)
    whole = moe(x)
    for rows in ([0], [149], [17, 4], list(range(30, 61))):
        assert torch.equal(moe(x[rows]), whole[rows])


def test_moe_does_not_read_unrouted_experts(device: torch.device, generator: torch.Generator) -> None:
    tensors, x = weights(torch.bfloat16, generator), torch.randn((4, HIDDEN), generator=generator).bfloat16()
    tensors["router_bias"][:] = torch.tensor([9.0, 0.0, 9.0, 0.0, 9.0, 0.0, 0.0])
    for expert in (1, 3, 5, 6):
        tensors["gate_up"][expert] = tensors["down"][expert] = torch.nan
    backend = TritonBackend()
    assert backend.make_moe(experts(backend, to_device(tensors, device)))(x.to(device)).isfinite().all()


@pytest.mark.parametrize("form", [None, "mxfp4"])
def test_expert_parallel_moe_outputs_sum_to_whole(
    device: torch.device, form: str | None, generator: torch.Generator
) -> None:
    """Each rank's output equals plain PyTorch on its experts. Other experts are not there, so they cannot be read. A
    token without a local expert gets zeros.
    """
    tensors, x = weights(torch.float32, generator), torch.randn((60, HIDDEN), generator=generator)
    packed = None if form is None else FORMS[form]

    def part(backend: ReferenceBackend, where: torch.device, here: range) -> Tensor:
        of = experts(backend, to_device(tensors, where), form=packed)
        of = replace(of, gate_up=[of.gate_up[each] for each in here], down=[of.down[each] for each in here])
        moe = backend.make_moe(replace(of, first_expert=here.start))
        assert isinstance(moe, GroupedMoE) == isinstance(backend, TritonBackend)
        return moe(x.to(where), x.to(where)).cpu()

    cpu, everything = torch.device("cpu"), range(COUNT)
    ranks = [range(3), range(3, 6), range(6, COUNT)]
    found = [part(TritonBackend(), device, here) for here in ranks]
    for here, each in zip(ranks, found, strict=True):
        wanted_here = part(ReferenceBackend(), cpu, here)
        assert torch.equal(each.any(1), wanted_here.any(1))
        assert error(each, wanted_here) < TOLERANCE[torch.float32]
    assert not found[2].any(1).all()
    assert error(found[0] + found[1] + found[2], part(TritonBackend(), device, everything)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("tokens", "count"), [(1, 4), (700, 8), (1300, 128)])
def test_sort_rows_by_expert_is_stable(
    device: torch.device, tokens: int, count: int, generator: torch.Generator
) -> None:
    chosen = torch.randint(0, count, (tokens, 2), generator=generator)
    order, starts = sort_rows_by_expert(chosen.to(device), count)
    assert torch.equal(order.cpu().long(), chosen.flatten().argsort(stable=True))
    assert starts.tolist() == [int((chosen < expert).sum()) for expert in range(count + 1)]
