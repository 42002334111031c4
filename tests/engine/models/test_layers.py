"""Layers may differ in any size, and a new sublayer needs only its own file: existing kernels compute it, one by one
or, on CPUs, in one native call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.architecture.recurrent import MatrixStateSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.recurrent.mixer import MatrixStateMixer
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer
from quire.engine.worker import device_plan
from quire.kernels.backend import Operations
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.recurrence import Recurrence, to_compute_dtype
from tests.engine.harness import request, run
from tests.tiny_models import VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
Alter = Callable[[DecoderSpec], DecoderSpec]


def skip_without_our_linears() -> None:
    if MISSING is not None or not CpuBackend().prefers_native_linear(torch.bfloat16):
        pytest.skip(MISSING or "linears are oneDNN's on this machine")


def with_unequal_layers(spec: DecoderSpec) -> DecoderSpec:
    """Give each layer its own heads, head sizes, windows, RoPE, norms, biases and MLPs."""
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
    """A sublayer that no model has: its input times a gate of its own."""

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


def with_gates(spec: DecoderSpec) -> DecoderSpec:
    """Put a gate before attention in the first layer, after it in the second, and at the end of the last."""
    gate = GateSpec(NormSpec(1e-5))
    first, second, third = spec.layers
    return replace(spec, layers=((gate, *first), (second[0], gate, second[1]), (*third, gate)))


@dataclass(frozen=True, slots=True)
class LeakyRecurrenceSpec(MatrixStateSpec):
    """A recurrent sublayer that no model has, with one number per channel and without a convolution."""

    @property
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.num_heads, self.value_dim),)

    def extra_values_per_draft(self, heads: int) -> int:
        return heads * self.value_dim

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        shapes = linear_shapes([f"{layer}.leaky.in_{name}" for name in "abz"], self.num_channels, hidden_size)
        shapes |= linear_shapes([f"{layer}.leaky.out"], hidden_size, self.num_channels)
        return shapes | norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)


@dataclass(frozen=True, slots=True)
class LeakyRecurrence(Recurrence):
    """h = sigmoid(a) h + b. It has no kernel, so the reference computes it."""

    num_channels: int

    @property
    def input_dim(self) -> int:
        return self.num_channels

    @property
    def head_inputs_dim(self) -> int:
        return self.num_channels

    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        b, a = (each.view(matrices.shape) for each in to_compute_dtype(numbers).chunk(2))
        matrices = matrices * a.sigmoid() + b
        return matrices, matrices[:, 0]

    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        return (read.flatten() * to_compute_dtype(z).sigmoid()).to(z.dtype)


class LeakyMixer(MatrixStateMixer):
    def __init__(self, spec: LeakyRecurrenceSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "leaky")
        part = build_context.shard.head_slice(self._head_span, spec.value_dim)
        self._a, self._b, self._z = (self._make_linear({f"in_{name}": part}) for name in "abz")
        self._out = self._make_linear({"out": build_context.shard.input_slice(spec.num_channels)})

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._norms, self._a, self._b, self._z, self._out)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        linears = (self._a, self._b, self._z)
        normed, residual = self._norms.norm_for_linears(linears, ops, self._input_norm, x, residual)
        a, b, z = (ops.apply_linear(each.packed_linear, normed, step.linear_context) for each in linears)
        return self._project_output(ops, self._run_recurrence(ops, b, z, a, step), residual, step)

    @cached_property
    def recurrence_params(self) -> LeakyRecurrence:
        return LeakyRecurrence(self._state_spec.num_channels)


build_sublayer.register(LeakyRecurrenceSpec, LeakyMixer)


def with_leaky_recurrence(spec: DecoderSpec) -> DecoderSpec:
    """Replace the first layer's attention by a leaky recurrence."""
    part = LeakyRecurrenceSpec(num_heads=2, key_dim=1, value_dim=16, conv_width=1, norm=NormSpec(1e-5))
    return spec.with_mixers([part, *[None] * (spec.num_layers - 1)])


def answers(
    path: Path, backend: str, dtype: str, **options: object
) -> tuple[EngineCore, list[tuple[list[int], list[float]]]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 40)]
    options = {"num_kv_blocks": 64, "load_format": "dummy", "max_num_batched_tokens": 24} | options
    engine = EngineCore(EngineConfig(model=str(path), dtype=dtype, attention_backend=backend, **options))
    requests = [request(str(i), prompt, max_tokens=4, logprobs=0) for i, prompt in enumerate(prompts)]
    outputs = run(engine, requests)
    return engine, [(outputs[each.id].ids, [token.logprob for token in outputs[each.id].logprobs]) for each in requests]


@pytest.mark.parametrize("alter", [with_unequal_layers, with_gates])
def test_custom_layers_equal_reference_backend(alter: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_our_linears()
    original_spec = device_plan.decoder_spec
    monkeypatch.setattr(device_plan, "decoder_spec", lambda config: alter(original_spec(config)))
    path = save_tiny_model(tmp_path, "llama")
    engine, together = answers(path, "cpu", "bfloat16")
    assert engine.executor._model._recorded_layers[1] is not None
    _, exact = answers(path, "cpu", "float32")
    _, reference = answers(path, "reference", "float32")
    for (ids, logprobs), (right, expected) in zip(exact, reference, strict=True):
        assert ids == right
        assert logprobs == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert answers(path, "cpu", "bfloat16")[1] == together


def test_recurrence_without_kernel_runs_on_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_our_linears()
    original_spec = device_plan.decoder_spec
    monkeypatch.setattr(device_plan, "decoder_spec", lambda config: with_leaky_recurrence(original_spec(config)))
    path = save_tiny_model(tmp_path, "llama")
    engine, together = answers(path, "cpu", "bfloat16")
    assert engine.executor._model._recorded_layers[1] is None
    assert answers(path, "cpu", "bfloat16", max_num_batched_tokens=64)[1] == together
    _, exact = answers(path, "cpu", "float32")
    _, reference = answers(path, "reference", "float32")
    for (ids, logprobs), (right, expected) in zip(exact, reference, strict=True):
        assert ids == right
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_kv_block_bytes_sum_over_unequal_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original_spec = device_plan.decoder_spec
    monkeypatch.setattr(device_plan, "decoder_spec", lambda config: with_unequal_layers(original_spec(config)))
    path = save_tiny_model(tmp_path, "llama")
    engine, _ = answers(path, "reference", "float32", num_kv_blocks=None, kv_cache_memory=0.01)
    token = 2 * (2 * 16 + 1 * 32 + 3 * 64) * 4
    assert sum(each.nbytes for each in engine.executor._kv_tensors) == engine.info.num_blocks * 16 * token
    assert f"{16 * token / 1024:,.0f} KiB per block" in engine.info.arithmetic
    heads = ("2 heads x 16", "1 heads x 32", "3 heads x 64")
    assert " + ".join(f"2 x 16 tokens x {each} x 4 B x 1 layers" for each in heads) in engine.info.arithmetic
