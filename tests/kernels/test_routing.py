"""Routing of mixtures of experts: each rule against Python floats, row by row, in the reference and in compiled
mixtures. A row's bits must depend only on the row.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.decoder.compiled_moe import CompiledMoE
from quire.kernels.experts import ReferenceMoE
from quire.kernels.parameters.routing import Routing
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import MoEComponents, choose_experts
from tests.kernels.ragged import error

COUNT, HIDDEN, INNER = 12, 64, 32
SHAPES = {"router": (COUNT, HIDDEN), "gate_up": (COUNT, 2 * INNER, HIDDEN), "down": (COUNT, HIDDEN, INNER)}
RULES = {
    "softmax": Routing(3),
    "of-all": Routing(3, is_normalized=False, scale=2.5),
    "sigmoid": Routing(4, "sigmoid", normalizer_eps=1e-20, scale=1.5),
    "sigmoid-itself": Routing(2, "sigmoid", is_normalized=False),
    "inputs": Routing(2, "sigmoid", is_normalized=False, weights_inputs=True),
    "best-groups": Routing(3, is_normalized=False, num_groups=4, top_k_groups=2, scale=16.0),
    "sums-of-two": Routing(5, "sigmoid", num_groups=3, top_k_groups=2, group_score_top_k=2, normalizer_eps=1e-20),
    "softcapped": Routing(3, "sigmoid", softcap=0.7),
    "mixer": Routing(2, "mixer", jitter=0.2),
}
CORRECTED = {"softmax", "sigmoid", "sums-of-two", "softcapped"}


def expected_weights(scores: list[float], rule: Routing, correction: list[float] | None) -> dict[int, float]:
    """The weight of each chosen expert of a row, by expert number."""
    if rule.softcap is not None:
        scores = [rule.softcap * math.tanh(s / rule.softcap) for s in scores]
    if rule.score_function == "mixer":
        return mixer_weights(scores, rule)
    total = sum(math.exp(s) for s in scores)
    weights = [1 / (1 + math.exp(-s)) if rule.score_function == "sigmoid" else math.exp(s) / total for s in scores]
    wanted = [w + c for w, c in zip(weights, correction or [0.0] * len(weights), strict=True)]
    size = len(scores) // rule.num_groups
    groups = [range(first, first + size) for first in range(0, len(scores), size)]
    best = sorted(
        groups, key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[: rule.group_score_top_k])
    )
    among = [e for group in best[: rule.top_k_groups] for e in group]
    chosen = sorted(among, key=lambda e: -wanted[e])[: rule.top_k]
    divisor = sum(weights[e] for e in chosen) if rule.is_normalized else 1.0
    return {e: weights[e] / divisor * rule.scale for e in chosen}


def mixer_weights(scores: list[float], rule: Routing) -> dict[int, float]:
    found: dict[int, float] = {}
    for _ in range(rule.top_k):
        left = [e for e in range(len(scores)) if e not in found]
        best = max(left, key=lambda e: scores[e])
        top = scores[best]
        near = [e for e in left if (top - scores[e]) / max(abs(scores[e]), top) <= 2 * rule.jitter]
        found[best] = math.exp(top) / sum(math.exp(scores[e]) for e in near)
    return found


def random_scores(generator: torch.Generator, rows: int, name: str) -> tuple[Tensor, Tensor | None]:
    scores = torch.randn((rows, COUNT), generator=generator) * 2
    return scores, torch.randn(COUNT, generator=generator) * 0.3 if name in CORRECTED else None


def router(rule: Routing, correction: Tensor | None = None) -> MoEComponents:
    """Without experts. The identity makes the scores."""
    return MoEComponents(lambda x, _: x, [], [], rule, score_correction_bias=correction)


@pytest.mark.parametrize("name", RULES)
def test_choose_experts_follows_routing_rule(name: str, generator: torch.Generator) -> None:
    scores, correction = random_scores(generator, 60, name)
    chosen, weights = choose_experts(scores, router(RULES[name], correction))
    for row, experts, parts in zip(scores.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        wanted = expected_weights(row, RULES[name], None if correction is None else correction.tolist())
        assert dict(zip(experts, parts, strict=True)) == pytest.approx(wanted, rel=1e-5)


def make_moe_components(
    backend: CpuBackend | ReferenceBackend, rule: Routing, correction: Tensor | None, given: dict[str, Tensor]
) -> MoEComponents:
    linears = [[backend.pack_linear(each, None) for each in given[name]] for name in ("gate_up", "down")]
    router = backend.pack_linear(given["router"], None, wide=True)
    wide = given["router"].dtype != given["down"].dtype
    return MoEComponents(router, *linears, rule, score_correction_bias=correction, has_float32_router=wide)


@pytest.mark.few(18)
@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("float_router", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_compiled_moe_follows_routing_rule_in_every_batch(
    cpu: CpuBackend, name: str, dtype: torch.dtype, float_router: bool, generator: torch.Generator
) -> None:
    rule, (_, correction) = RULES[name], random_scores(generator, 1, name)
    tensors = {key: torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5 for key, shape in SHAPES.items()}
    tensors = {key: each if key == "router" and float_router else each.to(dtype) for key, each in tensors.items()}
    x = torch.randn((70, HIDDEN), generator=generator).to(dtype)
    moe = cpu.make_moe(make_moe_components(cpu, rule, correction, tensors))
    assert isinstance(moe, CompiledMoE) or not cpu.prefers_native_linear(dtype)
    got, w = moe(x), {key: each.double() for key, each in tensors.items()}
    total = torch.zeros((70, HIDDEN), dtype=torch.float64)
    for at, row in enumerate(x.double()):
        scores = (w["router"] @ row).tolist()
        for expert, part in expected_weights(scores, rule, None if correction is None else correction.tolist()).items():
            read, weight = (row * part, 1.0) if rule.weights_inputs else (row, part)
            gate, up = (w["gate_up"][expert] @ read).chunk(2)
            total[at] += weight * (w["down"][expert] @ (torch.nn.functional.silu(gate) * up))
    tolerance = 3e-6 if dtype == torch.float32 else 1.5e-2
    assert error(got, total) < tolerance
    if dtype == torch.float32:  # the reference rounds bf16 scores on some machines and may choose other experts
        assert (
            error(
                ReferenceBackend().make_moe(make_moe_components(ReferenceBackend(), rule, correction, tensors))(x),
                total,
            )
            < tolerance
        )
    for rows in ([0], [69, 3], list(range(20, 51))):
        assert torch.equal(moe(x[rows]), got[rows])
    torch.set_num_threads(3)
    assert torch.equal(moe(x), got)


def test_moe_with_uncompiled_routing_rule_is_computed_by_reference(cpu: CpuBackend, generator: torch.Generator) -> None:
    given = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    rule = Routing(2, "not in the kernels")  # type: ignore[arg-type]
    assert isinstance(cpu.make_moe(make_moe_components(cpu, rule, None, given)), ReferenceMoE)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Routing(13), "13 of 12 experts"),
        (Routing(2, num_groups=5), "12 experts in 5 groups"),
        (Routing(2, num_groups=3, top_k_groups=4), "4 of 3 groups"),
        (Routing(2, num_groups=12, top_k_groups=2, group_score_top_k=2), "by their 2 best"),
        (Routing(5, num_groups=3, top_k_groups=1), "5 experts of 1 groups of 4"),
    ],
)
def test_invalid_routing_returns_reason(rule: Routing, says: str) -> None:
    reason = rule.invalid_reason(COUNT)
    assert reason is not None
    assert says in reason


def test_add_gated_matches_float64_per_row(cpu: CpuBackend, generator: torch.Generator) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        x, residual = (torch.randn((9, 83), generator=generator).to(dtype) for _ in range(2))
        gate = torch.randn((9, 1), generator=generator).to(dtype)
        expected = x.double() * gate.double().sigmoid() + residual.double()
        whole = cpu.add_gated(x, gate, residual.clone())
        for got in (whole, ReferenceBackend().add_gated(x, gate, residual)):
            assert error(got, expected) < tolerance
        assert torch.equal(cpu.add_gated(x[3:4], gate[3:4], residual[3:4].clone()), whole[3:4])
