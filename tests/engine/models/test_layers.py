"""Layers may differ in anything, and a new part needs nothing but its own file: kernels that are there compute it, one
by one or, on CPUs, all in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer
from quire.engine.worker import device_plan
from quire.kernels.backend import Operations
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import request, run
from tests.tiny_models import VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
Alter = Callable[[DecoderSpec], DecoderSpec]


def unequal(spec: DecoderSpec) -> DecoderSpec:
    """Heads, their sizes, windows, rotations, norms, biases and feed-forward parts of their own."""
    attention = {
        "head_dim": [16, 32, 64],
        "num_heads": [4, 2, 6],
        "num_kv_heads": [2, 1, 3],
        "window": [None, 20, None],
    }
    attention |= {
        "rope": [None, *[each.rope for each in spec.sublayers_of_kind(AttentionLayerSpec)[1:]]],
        "qkv_bias": [True, False, False],
    }
    norms = [NormSpec(1e-6), NormSpec(1e-2, 1.0), NormSpec(1e-5)]
    spec = spec.replace_sublayer_fields(AttentionLayerSpec, norm=norms, qk_norm=[None, "heads", "heads"], **attention)
    return spec.replace_sublayer_fields(
        MLPSpec,
        intermediate_size=[96, 160, 32],
        activation=["gelu_tanh", "silu", "silu"],
        output_norm=[False, True, False],
    )


@dataclass(frozen=True, slots=True)
class GateSpec(SublayerSpec):
    """A part that is nowhere else: its input times a gate of its own."""

    norm: NormSpec

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return None


class Gate(Sublayer):
    def __init__(self, spec: GateSpec, making: BuildContext, layer: str) -> None:
        self._name, size = f"{layer}.gate", making.hidden_size
        self._norms = NormWeights({f"{self._name}.norm": size}, making.dtype, spec.norm)
        self._linear = FusedLinear(making.scheme, size, {f"{self._name}.in": 2 * size}, bias=False)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters() | self._linear.parameters()

    def forward(
        self, run: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._norms.add_and_norm(run, f"{self._name}.norm", x, residual)
        return run.silu_mul(run.apply_linear(self._linear.packed_linear, x, step.linear_context)), residual


build_sublayer.register(GateSpec, Gate)


def gated(spec: DecoderSpec) -> DecoderSpec:
    """In one layer before attention, in one between, in the last behind all."""
    gate = GateSpec(NormSpec(1e-5))
    first, second, third = spec.layers
    return replace(spec, layers=((gate, *first), (second[0], gate, second[1]), (*third, gate)))


def answers(
    path: Path, backend: str, dtype: str, **options: object
) -> tuple[EngineCore, list[tuple[list[int], list[float]]]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 40)]
    options = {"num_kv_blocks": 64, "load_format": "dummy", "max_num_batched_tokens": 24} | options
    engine = EngineCore(EngineConfig(model=str(path), dtype=dtype, attention_backend=backend, **options))
    asked = [request(str(i), prompt, max_tokens=4, logprobs=0) for i, prompt in enumerate(prompts)]
    found = run(engine, asked)
    return engine, [(found[each.id].ids, [token.logprob for token in found[each.id].logprobs]) for each in asked]


@pytest.mark.parametrize("alter", [unequal, gated])
def test_any_layers(alter: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if MISSING is not None or not CpuBackend().prefers_native_linear(torch.bfloat16):
        pytest.skip(MISSING or "linears are oneDNN's on this machine")
    plain = device_plan.decoder_spec
    monkeypatch.setattr(device_plan, "decoder_spec", lambda config: alter(plain(config)))
    path = save_tiny_model(tmp_path, "llama")
    engine, together = answers(path, "cpu", "bfloat16")
    assert engine.executor._model._recorded_layers[1] is not None
    _, exact = answers(path, "cpu", "float32")
    _, judged = answers(path, "reference", "float32")
    for (ids, logprobs), (right, expected) in zip(exact, judged, strict=True):
        assert ids == right
        assert logprobs == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert answers(path, "cpu", "bfloat16")[1] == together


def test_a_page_has_what_each_layer_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device_plan.decoder_spec
    monkeypatch.setattr(device_plan, "decoder_spec", lambda config: unequal(plain(config)))
    path = save_tiny_model(tmp_path, "llama")
    engine, _ = answers(path, "reference", "float32", num_kv_blocks=None, kv_cache_memory=0.01)
    token = 2 * (2 * 16 + 1 * 32 + 3 * 64) * 4
    assert sum(each.nbytes for each in engine.executor._kv_tensors) == engine.info.num_blocks * 16 * token
    assert f"{16 * token / 1024:,.0f} KiB a page" in engine.info.arithmetic
    heads = ("2 heads x 16", "1 heads x 32", "3 heads x 64")
    assert " + ".join(f"2 x 16 tokens x {each} x 4 B x 1 layers" for each in heads) in engine.info.arithmetic
