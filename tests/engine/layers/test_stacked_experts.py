"""Experts' weights in one tensor per layer, written while they are loaded."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.schemes import QuantizationScheme, UnquantizedScheme
from quire.engine.layers.schemes.online_quantization import OnlineQuantizedScheme
from quire.engine.layers.schemes.stacked import StackedExpertScheme, make_expert_schemes
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

EXPERTS, HIDDEN, INNER = 5, 16, 24
DTYPE = torch.float64
"""In this dtype the reference's linears keep the weight that they are given."""


def make_experts(schemes: list[QuantizationScheme], hidden: int, *, bias: bool) -> list[tuple[FusedLinear, ...]]:
    def linears(place: int, scheme: QuantizationScheme) -> tuple[FusedLinear, ...]:
        names = [f"experts.{place}.{name}" for name in ("gate", "up", "down")]
        return (
            FusedLinear(scheme, hidden, {names[0]: INNER, names[1]: INNER}, bias=bias),
            FusedLinear(scheme, INNER, {names[2]: hidden}, bias=bias),
        )

    return [linears(place, scheme) for place, scheme in enumerate(schemes)]


def load(experts: list[tuple[FusedLinear, ...]]) -> dict[str, Tensor]:
    """Loads the tensors in a random order and returns them."""
    table = {name: each for linears in experts for linear in linears for name, each in linear.parameters().items()}
    generator, loaded = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name in random.Random(5).sample(sorted(table), len(table)):
        loaded[name] = torch.randn(table[name].shape, dtype=DTYPE, generator=generator)
        table[name].weight_loader(loaded[name].clone())
    return loaded


def weights_of(experts: list[tuple[FusedLinear, ...]], linear: int) -> list[Tensor]:
    return [each[linear].packed_linear.weight for each in experts]  # type: ignore[attr-defined]


@pytest.mark.parametrize("bias", [False, True])
def test_experts_weights_are_consecutive_parts_of_one_tensor(bias: bool) -> None:
    """Each linear computes what its own tensors say, and no byte is kept twice."""
    schemes = make_expert_schemes(UnquantizedScheme(ReferenceBackend(), DTYPE), EXPERTS, stacks=True)
    experts = make_experts(list(schemes), HIDDEN, bias=bias)
    loaded = load(experts)
    for linear, (names, inner) in enumerate(((("gate", "up"), HIDDEN), (("down",), INNER))):
        weights = weights_of(experts, linear)
        assert len({each.untyped_storage().data_ptr() for each in weights}) == 1
        assert [each.storage_offset() for each in weights] == [place * weights[0].numel() for place in range(EXPERTS)]
        assert weights[0].untyped_storage().nbytes() == sum(each.nbytes for each in weights)
        x = torch.randn((3, inner), dtype=DTYPE)
        for place in range(EXPERTS):
            parts = [loaded[f"experts.{place}.{name}.weight"] for name in names]
            expected = x @ torch.cat(parts).t()
            if bias:
                expected += torch.cat([loaded[f"experts.{place}.{name}.bias"] for name in names])
            torch.testing.assert_close(experts[place][linear].packed_linear(x, NO_ADAPTERS), expected)


def test_linears_of_equal_shapes_do_not_share_a_tensor() -> None:
    """The up and down projections of ungated experts whose inner size is the hidden size."""
    schemes = make_expert_schemes(UnquantizedScheme(ReferenceBackend(), DTYPE), 2, stacks=True)
    experts = [
        tuple(FusedLinear(scheme, 8, {f"experts.{place}.{name}": 8}, bias=False) for name in ("up", "down"))
        for place, scheme in enumerate(schemes)
    ]
    loaded = load(experts)
    for place, linears in enumerate(experts):
        for linear, name in zip(linears, ("up", "down"), strict=True):
            assert torch.equal(linear.packed_linear.weight, loaded[f"experts.{place}.{name}.weight"])  # type: ignore[attr-defined]


def test_weights_that_would_begin_unaligned_stay_apart() -> None:
    schemes = make_expert_schemes(UnquantizedScheme(ReferenceBackend(), DTYPE), EXPERTS, stacks=True)
    experts = make_experts(list(schemes), hidden=15, bias=False)
    load(experts)
    assert len({each.untyped_storage().data_ptr() for each in weights_of(experts, 0)}) == EXPERTS
    assert len({each.untyped_storage().data_ptr() for each in weights_of(experts, 1)}) == 1


def test_only_unquantized_experts_are_stacked() -> None:
    backend = ReferenceBackend()
    whole, rounded = UnquantizedScheme(backend, DTYPE), OnlineQuantizedScheme(backend, DTYPE, "int8")
    assert make_expert_schemes(whole, 3, stacks=False) == [whole] * 3
    assert make_expert_schemes(rounded, 3, stacks=True) == [rounded] * 3


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_engine_with_stacked_experts_gives_same_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that checkpoints store one by one, and together with biases."""
    path = save_tiny_model(tmp_path, family)

    def answers() -> tuple[list[int], list[float]]:
        engine = EngineCore(
            EngineConfig(model=str(path), attention_backend="reference", dtype="float32", num_kv_blocks=50)
        )
        found = run(engine, [request("a", range(5, 40), max_tokens=8, logprobs=0)])["a"]
        return found.ids, [each.logprob for each in found.logprobs]

    apart = answers()
    monkeypatch.setattr(ReferenceBackend, "stacks_experts", lambda *_: True)
    written = list[int]()
    pack = StackedExpertScheme.pack_linears
    monkeypatch.setattr(
        StackedExpertScheme,
        "pack_linears",
        lambda scheme, *args, **named: written.append(scheme._place) or pack(scheme, *args, **named),
    )
    assert answers() == apart
    assert len(written) > len(set(written)) > 2
