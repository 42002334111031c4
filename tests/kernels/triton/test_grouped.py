"""PyTorch's grouped product for experts: results, the trial that puts it before Triton's, and when it is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import silu
from quire.kernels.backend import MoEComponents
from quire.kernels.gpu.experts import grouped_matmul, grouped_moe, grouped_trial
from quire.kernels.gpu.experts.grouped_moe import GroupedMoE
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.parameters.activation import Activation
from quire.kernels.parameters.routing import Routing
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.kernels.test_experts import CHOSEN, COUNT, HIDDEN, INNER, TOLERANCE

TOKENS = (4, 40)
"""The trial's sizes here: the interpreter is slow."""
MANY = TOKENS[-1] * CHOSEN
BFLOAT16 = torch.bfloat16


def strict_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm with the checks of its GPU implementation (aten/src/ATen/native/GroupedMMUtils.h,
    cuda/GroupMM.cu), which the CPU's lacks. Rows after the last group are NaN.
    """
    assert a.dtype == b.dtype == BFLOAT16
    assert (a.dim(), b.dim(), offs.dim()) == (2, 3, 1)
    assert a.shape[1] == b.shape[1]
    assert offs.dtype == torch.int32
    assert offs.is_contiguous()
    assert len(offs) == len(b) < 1024
    assert a.device == b.device == offs.device
    assert a.stride() == (a.shape[1], 1)
    assert b.stride()[1:] == (1, b.shape[1])
    assert all(each.data_ptr() % 16 == 0 for each in (a, b))
    assert all(step * 2 % 16 == 0 for step in (a.stride(0), b.stride(2), b.shape[2]))
    out = torch._grouped_mm(a, b, offs)
    out[offs[-1] :] = torch.nan
    return out


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that PyTorch's product has multiplied. The trial finds it faster for any number of rows."""
    calls: list[tuple[int, ...]] = []

    def multiply(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        calls.append((len(a), *b.shape))
        return strict_grouped_mm(a, b, offs)

    monkeypatch.setattr(grouped_matmul, "grouped_mm", multiply)
    if device.type == "cpu":
        monkeypatch.setattr(grouped_matmul, "is_supported", lambda device, dtype: dtype == BFLOAT16)
    elif not grouped_matmul.is_supported(device, BFLOAT16):
        pytest.skip("PyTorch has no grouped kernel for this GPU")
    set_times(monkeypatch, lambda rows: 0.5)
    grouped_trial.VERDICTS.clear()
    yield calls
    grouped_trial.VERDICTS.clear()


def set_times(monkeypatch: pytest.MonkeyPatch, share: Callable[[int], float]) -> None:
    """Let PyTorch's product take this share of Triton's time, by the number of tokens."""
    measurements = cycle(product(reversed(TOKENS), (True, False)))

    def measured(call: Callable[[], object], device: torch.device) -> float:
        call()
        tokens, is_grouped = next(measurements)
        return share(tokens) if is_grouped else 1.0

    monkeypatch.setattr(grouped_trial, "TRIAL_TOKENS", TOKENS)
    monkeypatch.setattr(grouped_trial, "measure_seconds", measured)


def stacks(generator: torch.Generator, outs: int = 2 * INNER) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    drawn = {"router": draw(COUNT, HIDDEN), "gate_up": draw(COUNT, outs, HIDDEN), "down": draw(COUNT, HIDDEN, INNER)}
    return {name: 2 * each for name, each in drawn.items()}


def components(
    backend: ReferenceBackend, given: dict[str, Tensor], device: torch.device, dtype: torch.dtype = BFLOAT16
) -> MoEComponents:
    """Without biases; weights are parts of one tensor."""
    there = {name: each.to(device, dtype) for name, each in given.items()}
    parts = [[backend.pack_linear(each, None) for each in there[name]] for name in ("gate_up", "down")]
    return MoEComponents(backend.pack_linear(there["router"], None, wide=True), *parts, Routing(CHOSEN))


def wanted(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The mixture in float64, with bfloat16 weights, token by token."""
    w = {name: each.bfloat16().double() for name, each in given.items()}
    rows = []
    for row in x.double():
        scores = w["router"] @ row
        chosen = scores.topk(CHOSEN).indices
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen.tolist(), scores[chosen].softmax(-1), strict=True):
            gate, up = (w["gate_up"][expert] @ row).chunk(2)
            total += share * (w["down"][expert] @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def random_rows(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn((count, HIDDEN), generator=generator).bfloat16()


@pytest.mark.parametrize("rows", [TOKENS[0], 50])
def test_grouped_moe_output_is_weighted_sum_of_experts(
    rows: int, device: torch.device, generator: torch.Generator, grouped: list[tuple[int, ...]]
) -> None:
    given, x, backend = stacks(generator), random_rows(rows, generator), TritonBackend()
    moe = backend.make_moe(components(backend, given, device))
    grouped.clear()  # drop the trial's calls
    assert error(moe(x.to(device)).cpu(), wanted(x, given)) < TOLERANCE[BFLOAT16]
    many = rows * CHOSEN
    assert grouped == [(many, COUNT, HIDDEN, 2 * INNER), (many, COUNT, INNER, HIDDEN)], "gate and up are one product"


ROUTINGS = [
    Routing(CHOSEN, "sigmoid", normalizer_eps=1e-9, scale=2.5),
    Routing(2, "sigmoid", is_normalized=False, weights_inputs=True),
    Routing(1),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_moe_with_routing_and_activation_matches_reference(
    routing: Routing, gated: bool, device: torch.device, generator: torch.Generator, grouped: list[tuple[int, ...]]
) -> None:
    given, x = stacks(generator, (1 + gated) * INNER), random_rows(45, generator)

    def mixed(backend: ReferenceBackend, where: torch.device) -> Tensor:
        activation = None if gated else Activation("relu2")
        of = replace(components(backend, given, where), routing=routing, activation=activation)
        return backend.make_moe(of)(x.to(where)).cpu()

    found = mixed(TritonBackend(), device)
    assert grouped
    assert error(found, mixed(ReferenceBackend(), torch.device("cpu"))) < TOLERANCE[BFLOAT16]


def test_grouped_outputs_of_expert_parallel_ranks_sum_to_whole(
    device: torch.device, generator: torch.Generator, grouped: list[tuple[int, ...]]
) -> None:
    """Other ranks' rows, which the product leaves unwritten, reach no sum."""
    given, x = stacks(generator), random_rows(60, generator)
    total = torch.zeros((60, HIDDEN), dtype=torch.float64)
    for here in (range(3), range(3, COUNT)):
        backend = TritonBackend()
        of = components(backend, given, device)
        of = replace(of, gate_up=of.gate_up[here.start : here.stop], down=of.down[here.start : here.stop])
        moe = backend.make_moe(replace(of, first_expert=here.start))
        grouped.clear()
        total += moe(x.to(device)).cpu().double()
        assert [shape[1] for shape in grouped] == [len(here)] * 2
    assert error(total, wanted(x, given)) < TOLERANCE[BFLOAT16]


@pytest.mark.parametrize(
    ("share", "least"),
    [
        (lambda tokens: 0.5, TOKENS[0] * CHOSEN),
        (lambda tokens: 0.5 if tokens == TOKENS[1] else 2.0, MANY),
        (lambda tokens: 2.0 if tokens == TOKENS[1] else 0.5, None),
        (lambda tokens: 0.99, None),
    ],
)
def test_trial_by_time_decides_from_how_many_rows_grouped_product_serves(
    share: Callable[[int], float],
    least: int | None,
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    grouped: list[tuple[int, ...]],
) -> None:
    set_times(monkeypatch, share)
    given, backend = stacks(generator), TritonBackend()
    moe = backend.make_moe(components(backend, given, device))
    backend.make_moe(components(backend, stacks(generator), device))
    assert list(grouped_trial.VERDICTS.values()) == [least], "one layer of a shape is tried"
    for rows in (1, TOKENS[0], TOKENS[1] - 1, TOKENS[1]):
        x = random_rows(rows, generator)
        grouped.clear()
        assert error(moe(x.to(device)).cpu(), wanted(x, given)) < TOLERANCE[BFLOAT16]
        assert bool(grouped) == (least is not None and rows * CHOSEN >= least)


def three_percent_off(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return strict_grouped_mm(a, b, offs) * 1.03


def one_row_of_another_group(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One group too early, as an offset that counts from 1 would be."""
    moved = offs.clone()
    moved[2] += 1
    return strict_grouped_mm(a, b, moved)


def nothing(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return strict_grouped_mm(a, b, offs) * torch.nan


def unsupported(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    raise RuntimeError("grouped mm is not supported on your system")


@pytest.mark.parametrize("fault", [three_percent_off, one_row_of_another_group, nothing, unsupported])
def test_wrong_or_raising_grouped_product_is_not_used(
    fault: Any,
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(grouped_matmul, "grouped_mm", fault)
    given, x, backend = stacks(generator), random_rows(50, generator), TritonBackend()
    moe = backend.make_moe(components(backend, given, device))
    assert list(grouped_trial.VERDICTS.values()) == [None]
    assert "Triton's kernel multiplies all experts, because torch._grouped_mm" in caplog.text
    assert error(moe(x.to(device)).cpu(), wanted(x, given)) < TOLERANCE[BFLOAT16]


def test_trial_sees_one_wrong_row_among_many() -> None:
    """Over all rows together its error would be below the trial's limit."""
    weights, x = torch.randn((1, 8, 8)).bfloat16(), torch.randn((40_000, 8)).bfloat16()
    product = strict_grouped_mm(x, weights.transpose(1, 2), torch.tensor([len(x)], dtype=torch.int32))
    product[1234] = product[1235]
    errors = grouped_trial.row_errors(product, x, weights.transpose(1, 2), [0, len(x)])
    assert errors.max() > grouped_trial.MAX_ERROR > errors.sort().values[-2]


def test_best_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calls, times = list[str](), iter([9.0, 6.0, 7.0, 8.0, 9.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    seconds = grouped_trial.measure_seconds(lambda: calls.append("call"), torch.device("cuda"))
    assert seconds == pytest.approx(6.0 / 1000 / 3)
    run = ["record", "call", "call", "call", "record"]
    assert calls == ["call", *run * 5], "the first call, which may compile, is not measured"


def test_product_that_waits_for_device_raises_only_in_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError), grouped_trial.refuse_waits(torch.device("cuda")):
        raise RuntimeError("called a synchronizing CUDA operation")
    with grouped_trial.refuse_waits(torch.device("cpu")):
        pass
    assert modes == [0, "error", 0]


def biased(of: MoEComponents, backend: TritonBackend) -> MoEComponents:
    return replace(of, down=[backend.pack_linear(each.weight, each.weight[:, 0].clone()) for each in of.down])


def apart(of: MoEComponents, backend: TritonBackend) -> MoEComponents:
    """Weights that are tensors of their own: a stack would be a second copy."""
    return replace(of, down=[backend.pack_linear(each.weight.clone(), None) for each in of.down])


def in_another_order(of: MoEComponents, backend: TritonBackend) -> MoEComponents:
    return replace(of, gate_up=of.gate_up[::-1])


def only_one(of: MoEComponents, backend: TritonBackend) -> MoEComponents:
    return replace(of, gate_up=of.gate_up[:1], down=of.down[:1])


@pytest.mark.parametrize("change", [biased, apart, in_another_order, only_one])
def test_experts_that_grouped_product_cannot_take_are_not_tried(
    change: Any, device: torch.device, generator: torch.Generator, grouped: list[tuple[int, ...]]
) -> None:
    backend = TritonBackend()
    moe = backend.make_moe(change(components(backend, stacks(generator), device), backend))
    assert isinstance(moe, GroupedMoE)
    moe(random_rows(50, generator).to(device))
    assert not grouped


@pytest.mark.parametrize(("deterministic", "dtype"), [(True, BFLOAT16), (False, torch.float32)])
def test_grouped_product_is_neither_deterministic_nor_float32(
    deterministic: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    grouped: list[tuple[int, ...]],
) -> None:
    """Its tiles depend on the number of rows, so a row's bits may depend on the batch."""
    backend = TritonBackend(deterministic=deterministic)
    assert not backend.stacks_experts(device, dtype)
    moe = backend.make_moe(components(backend, stacks(generator), device, dtype))
    moe(random_rows(50, generator).to(device, dtype))
    assert not grouped


@pytest.mark.parametrize(("major", "dtype", "served"), [
    (9, BFLOAT16, True), (10, BFLOAT16, True), (9, torch.float16, False), (8, BFLOAT16, False), (12, BFLOAT16, False),
])  # fmt: skip
def test_grouped_product_is_used_where_pytorch_has_a_kernel(
    major: int, dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert grouped_matmul.is_supported(torch.device("cuda", 0), dtype) == served
    assert not grouped_matmul.is_supported(torch.device("cpu"), dtype)


def test_dry_run_gives_grouped_product_no_rows(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels are only listed, none writes where groups end, but PyTorch's product runs: it must read nothing."""

    class NotLaunched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: None

    backend, ends = TritonBackend(), list[list[int]]()
    moe = backend.make_moe(components(backend, stacks(generator), device))
    for name in ("choose_experts", "sort_rows", "gather_rows", "combine_expert_outputs"):
        monkeypatch.setattr(grouped_moe.kernels, name, NotLaunched())
    multiply = grouped_matmul.grouped_mm
    monkeypatch.setattr(
        grouped_matmul, "grouped_mm", lambda a, b, offs: ends.append(offs.tolist()) or multiply(a, b, offs)
    )
    for _ in range(3):
        dirty = torch.full((COUNT + 1,), 2**30, dtype=torch.int32, device=device)  # memory that the next may get
        del dirty
        moe(random_rows(50, generator).to(device))
    assert ends == [[0] * COUNT] * 6
