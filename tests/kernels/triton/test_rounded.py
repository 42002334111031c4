"""Norms and gates fused with rounding to 8 bits: the bits of separate rounding, and close to the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.architecture.norm import NormSpec
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.sublayer import activate_gate_up
from quire.engine.worker import batch_sampler
from quire.engine.worker.sampling.device_sampler import sample_on_device
from quire.kernels.backend import NO_ADAPTERS, AdapterSlotSpec, Linear, LinearContext, LoraDelta
from quire.kernels.gpu import triton_backend, triton_fused
from quire.kernels.gpu.linears.triton_lora import TritonLinearWithLora
from quire.kernels.gpu.quantization import activation_rounding, quantized_linear, torch_matmul
from quire.kernels.gpu.quantization.activation_rounding import EightBitRounding
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.quantized_tensors import RoundedActivations, choose_rounding_and_needs_unrounded
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.kernels.ragged import error
from tests.kernels.triton.conftest import INTERPRETED
from tests.kernels.triton.few_bits import float8, grouped, rounded, there
from tests.kernels.triton.test_products import scaled_mm
from tests.tiers import slow
from tests.tiny_models import VOCAB, save_tiny_model

FORMS = [
    EightBitRounding(integers, by_blocks, pair_distance=0) for integers, by_blocks in product((False, True), repeat=2)
]
SHAPES = [(3, 128), (5, 200), (2, 1090)]
"""One block, part of a second, and several; row lengths that are no powers of two."""
OFF = {False: 0.07, True: 0.01}
"""Allowed error relative to the largest number: half a step of an 8-bit float or of an integer, and of bfloat16 before.
"""
reference = ReferenceBackend()


def dequantize(made: RoundedActivations) -> Tensor:
    """The values of codes and scales, float64."""
    assert isinstance(made.rounding, EightBitRounding)
    codes = made.codes if made.rounding.is_integer else made.codes.view(torch.float8_e4m3fn)
    scales = made.scales[:, None]
    if made.rounding.has_block_scales:
        scales = made.scales.t().repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.cpu().double() * scales.cpu().double()


def assert_same(made: RoundedActivations, wanted: RoundedActivations) -> None:
    assert made.codes.dtype == wanted.codes.dtype
    assert torch.equal(made.codes, wanted.codes)
    assert torch.equal(made.scales, wanted.scales)
    assert made.dtype == wanted.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_round_rows_equals_pytorch_rounding(
    form: EightBitRounding, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = torch.randn((5, 1090), generator=generator).to(dtype)
    x[2] *= 1000
    rounded_input = form.round_rows(x.to(device))
    seen = rounded(x, floats=not form.is_integer, block=128 if form.has_block_scales else 1090)
    assert torch.equal(dequantize(rounded_input), seen)
    assert len(form.round_rows(x[:0].to(device))) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_round_equals_norm_then_round(
    shape: tuple[int, int], form: EightBitRounding, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """RMSNorms and LayerNorms, of x or of a sum that is returned too, with and without the unrounded result."""
    x, residual = torch.randn((2, *shape), generator=generator).to(device, dtype)
    weight, bias = torch.randn((2, shape[1]), generator=generator).to(device)
    for shift, beside, whole in product((None, bias), (None, residual), (False, True)):
        given = None if beside is None else beside.clone()
        rounded_input, total = form.norm_and_round(x.clone(), given, weight, shift, 1e-5, whole=whole)
        if beside is None:
            wanted, summed = triton_fused.layer_norm(x, weight, shift, 1e-5), x
        else:
            wanted, summed = triton_fused.add_layer_norm(x.clone(), beside.clone(), weight, shift, 1e-5)
        assert torch.equal(total, summed)
        assert_same(rounded_input, form.round_rows(wanted))
        assert (rounded_input.unrounded is not None) == whole
        assert rounded_input.unrounded is None or torch.equal(rounded_input.unrounded, wanted)
        wide, factor = summed.cpu().double(), weight.cpu().double()
        reference_output = reference.rms_norm(wide, factor, 1e-5)
        if shift is not None:
            reference_output = reference.layer_norm(wide, factor, shift.cpu().double(), 1e-5)
        assert error(wanted.cpu(), reference_output) < (1e-6 if dtype == torch.float32 else 8e-3)
        assert error(dequantize(rounded_input), reference_output) < OFF[form.is_integer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 2500)], ids=str)
def test_gate_and_round_equals_gate_then_round(
    shape: tuple[int, int], form: EightBitRounding, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    rows, size = shape
    gate_up = (torch.randn((rows, 2 * size), generator=generator) * 4).to(device, dtype)
    for gelu, whole in product((False, True), repeat=2):
        rounded_input = form.gate_and_round(gate_up, gelu=gelu, whole=whole)
        wanted = triton_fused.gelu_mul(gate_up) if gelu else triton_fused.silu_mul(gate_up)
        assert_same(rounded_input, form.round_rows(wanted))
        assert (rounded_input.unrounded is not None) == whole
        assert rounded_input.unrounded is None or torch.equal(rounded_input.unrounded, wanted)
        reference_output = (reference.gelu_mul if gelu else reference.silu_mul)(gate_up.cpu().double())
        assert error(dequantize(rounded_input), reference_output) < OFF[form.is_integer]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("step", [32, 64])
def test_paired_codes_interleave_input_steps(
    step: int, form: EightBitRounding, device: torch.device, generator: torch.Generator
) -> None:
    """Codes of two input steps share words of two, as weights' do: the first step has the lower bytes."""
    paired = replace(form, pair_distance=step)
    gate_up, weight = torch.randn((3, 2 * 384), generator=generator).to(device), torch.ones(384, device=device)
    x = gate_up[:, 384:].contiguous()

    def both(round_: Callable[[EightBitRounding], RoundedActivations]) -> None:
        alone, rounded_input = round_(form), round_(paired)
        assert torch.equal(rounded_input.codes, alone.codes.unflatten(1, (-1, 2, step)).transpose(2, 3).flatten(1))
        assert torch.equal(rounded_input.scales, alone.scales)

    both(lambda each: each.round_rows(x))
    both(lambda each: each.norm_and_round(x, None, weight, None, 1e-5, whole=False)[0])
    both(lambda each: each.gate_and_round(gate_up, gelu=False, whole=False))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nonfinite_input_gives_nan_scale_in_one_row_or_block(
    form: EightBitRounding, bad: float, device: torch.device, generator: torch.Generator
) -> None:
    """No other row or block is affected."""
    gate_up = torch.randn((4, 2 * 300), generator=generator)
    gate_up[1, 300 + 130] = bad
    of_gate = form.gate_and_round(gate_up.to(device), gelu=False, whole=False).scales.cpu()
    expected = form.round_rows(triton_fused.silu_mul(gate_up.to(device))).scales.cpu()
    assert torch.equal(of_gate.isnan(), expected.isnan())
    assert of_gate.isnan().nonzero().tolist() == ([[1, 1]] if form.has_block_scales else [[1]])
    x = gate_up[:, 300:]
    rounded_input, _ = form.norm_and_round(x.to(device), None, torch.ones(300, device=device), None, 1e-5, whole=False)
    rows = rounded_input.scales.cpu().isnan()
    assert (rows.any(0) if form.has_block_scales else rows).tolist() == [False, True, False, False]


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """PyTorch multiplies blocks of 128 on Hopper only."""
    torch_matmul.trial_failure_reason.cache_clear()
    if device.type == "cpu":
        monkeypatch.setattr(torch_matmul, "scaled_mm", scaled_mm)
    yield
    torch_matmul.trial_failure_reason.cache_clear()


WEIGHTS: dict[str, Any] = {
    "a scale for the tensor": lambda generator: float8(64, 512, (64, 512), generator),
    "a scale for each output": lambda generator: float8(64, 512, (1, 512), generator),
    "blocks of 128": lambda generator: float8(128, 512, (128, 128), generator),
    "int8": lambda generator: grouped(64, 512, 512, 8, generator),
}


@pytest.mark.usefixtures("squares")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_linear_after_fused_rounding_equals_separate_rounding(
    kind: str, fixed: bool, device: torch.device, generator: torch.Generator
) -> None:
    """With PyTorch's matmuls and Triton's. Few rows are not rounded."""
    weight = there(WEIGHTS[kind](generator), device)
    linear = TritonBackend(deterministic=fixed).pack_quantized([weight], None, dtype=torch.bfloat16)
    assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
    factor = torch.randn(512, generator=generator).to(device)
    for rows in (1, 16, 17):
        x, gate_up = (torch.randn((rows, size), generator=generator).to(device).bfloat16() for size in (512, 1024))
        found = choose_rounding_and_needs_unrounded([linear], x)
        assert (found is None) == (rows <= 16 and not fixed)
        if found is None:
            continue
        form, whole = found
        assert not whole
        rounded_input, _ = form.norm_and_round(x, None, factor, None, 1e-6, whole=whole)
        assert torch.equal(
            linear(rounded_input, NO_ADAPTERS), linear(triton_fused.rms_norm(x, factor, 1e-6), NO_ADAPTERS)
        )
        rounded_input = form.gate_and_round(gate_up, gelu=False, whole=whole)
        assert torch.equal(linear(rounded_input, NO_ADAPTERS), linear(triton_fused.silu_mul(gate_up), NO_ADAPTERS))


class PackedLayer:
    """A part's packed linear."""

    def __init__(self, packed: Linear) -> None:
        self.packed_linear = packed


def make_norm(weight: Tensor, bias: Tensor | None = None) -> NormWeights:
    rounded_input = NormWeights(
        {"norm": len(weight)}, torch.float32, NormSpec(1e-6, is_layer_norm=bias is not None, bias=True)
    )
    for name, parameter in rounded_input.parameters().items():
        parameter.weight_loader(weight if name.endswith("weight") or bias is None else bias)
    return rounded_input


@pytest.mark.parametrize("centred", [False, True])
def test_linears_share_one_activation_rounding(
    centred: bool, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one linear, several linears, and linears that round x otherwise or not at all."""
    times = list[EightBitRounding]()
    of = EightBitRounding.round_rows
    monkeypatch.setattr(EightBitRounding, "round_rows", lambda form, x: times.append(form) or of(form, x))
    monkeypatch.setattr(torch_matmul, "trial_failure_reason", lambda *_: "for a test")  # all by Triton's kernels
    backend = TritonBackend()

    def pack(*weights: Any) -> PackedLayer:
        return PackedLayer(
            backend.pack_quantized([there(each, device) for each in weights], None, dtype=torch.bfloat16)
        )

    scales, blocks, whole = (float8(24, 256, block, generator) for block in ((1, 256), (24, 128), (24, 64)))
    several, beside, plain = pack(scales, blocks), pack(scales), pack(whole)
    integers = pack(grouped(16, 256, 256, 8, generator))
    dense = PackedLayer(backend.pack_linear(torch.randn((8, 256), generator=generator).to(device).bfloat16(), None))
    assert len(several.packed_linear.parts) == 2
    weight, bias = torch.randn((2, 256), generator=generator).to(device)
    x, residual = torch.randn((2, 20, 256), generator=generator).to(device).bfloat16()
    norm = make_norm(weight, bias if centred else None)
    for readers, again in (
        ((several,), 0),
        ((several, beside), 0),
        ((several, plain, dense), 0),
        ((dense, integers, several, beside), 2),  # two of them use 8-bit floats, and each rounds x itself
        ((plain, dense), 0),
    ):
        separate, total = norm.add_and_norm(backend, "norm", x.clone(), residual.clone())
        wanted = [backend.apply_linear(each.packed_linear, separate, NO_ADAPTERS) for each in readers]
        times.clear()
        read, summed = norm.norm_for_linears(readers, backend, "norm", x.clone(), residual.clone())
        assert torch.equal(summed, total)
        found = [backend.apply_linear(each.packed_linear, read, NO_ADAPTERS) for each in readers]
        assert all(map(torch.equal, found, wanted))
        assert len(times) == again
    gate_up = torch.randn((20, 512), generator=generator).to(device).bfloat16()
    times.clear()
    read = activate_gate_up(backend, gate_up, several)
    assert isinstance(read, RoundedActivations)
    assert torch.equal(
        several.packed_linear(read, NO_ADAPTERS), several.packed_linear(backend.silu_mul(gate_up), NO_ADAPTERS)
    )
    assert len(times) == 1, "of the separate way alone"


def test_lora_reads_unrounded_activations(device: torch.device, generator: torch.Generator) -> None:
    weight = there(float8(48, 256, (1, 256), generator), device)
    inner = TritonBackend().pack_quantized([weight], None, dtype=torch.bfloat16)
    linear = TritonLinearWithLora(inner, AdapterSlotSpec(2, 256, (32, 16), 8, torch.bfloat16, False, device))
    down, up = torch.randn((8, 256), generator=generator), torch.randn((32, 8), generator=generator)
    linear.put_adapter(1, linear.pack_one_adapter([LoraDelta(0, down.bfloat16() / 16, up.bfloat16())]))
    slots = (torch.arange(20) % 2).to(device)
    x, factor = torch.randn((20, 256), generator=generator).to(device).bfloat16(), torch.ones(256, device=device)
    found = choose_rounding_and_needs_unrounded([linear], x)
    assert found is not None
    form, whole = found
    assert whole
    rounded_input, _ = form.norm_and_round(x, None, factor, None, 1e-6, whole=whole)
    separate = triton_fused.rms_norm(x, factor, 1e-6)
    for context in (NO_ADAPTERS, LinearContext(slots, torch.argsort(slots, stable=True))):
        assert torch.equal(linear(rounded_input, context), linear(separate, context))
    assert not torch.equal(linear(rounded_input, context), inner(rounded_input, NO_ADAPTERS))
    plain = TritonLinearWithLora(lambda x, _: x[:, :48] + 0, AdapterSlotSpec(1, 256, (48,), 8, x.dtype, False, device))
    assert choose_rounding_and_needs_unrounded([plain], x) is None


def test_watched_linear_receives_unrounded_input(device: torch.device, generator: torch.Generator) -> None:
    """FusedLinear.watch_inputs replaces a linear by a function."""
    weight = there(float8(48, 256, (1, 256), generator), device)
    inner = TritonBackend().pack_quantized([weight], None, dtype=torch.bfloat16)
    seen = list[Tensor]()
    watched = PackedLayer(lambda x, context: seen.append(x) or inner(x, context))
    x = torch.randn((20, 256), generator=generator).to(device).bfloat16()
    norm = make_norm(torch.ones(256, device=device))
    read, _ = norm.norm_for_linears((watched,), TritonBackend(), "norm", x, None)
    TritonBackend().apply_linear(watched.packed_linear, read, NO_ADAPTERS)
    assert torch.equal(seen[0], triton_fused.rms_norm(x, torch.ones(256, device=device), 1e-6))


def test_unsupported_weights_are_not_rounded_in_norm(device: torch.device, generator: torch.Generator) -> None:
    """Rows narrower than a block, permuted inputs, and a GPU on which the bits differ."""
    for weight in (float8(8, 96, (1, 96), generator), grouped(8, 256, 256, 8, generator, ordered=True)):
        linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=torch.float32)
        x = torch.randn((20, weight.shape[1]), generator=generator).to(device)
        assert choose_rounding_and_needs_unrounded([linear], x) is None
        seen = rounded(x.cpu(), floats=not hasattr(weight, "input_order"))
        assert error(linear(x, NO_ADAPTERS).cpu(), seen @ weight.dequantize().double().T) < 0.02


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rounding_trial_detects_different_bits_and_errors(
    form: EightBitRounding, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> str | None:
        activation_rounding.trial_failure_reason.cache_clear()
        return activation_rounding.trial_failure_reason(form, torch.bfloat16, device, (3, 300))

    assert found() is None
    layer_norm = triton_fused.add_layer_norm
    with monkeypatch.context() as patch:
        patch.setattr(triton_fused, "add_layer_norm", lambda x, *rest: layer_norm(x * 1.01, *rest))
        assert found() == "other bits"
    with monkeypatch.context() as patch:
        patch.setattr(triton_fused, "silu_mul", lambda gate_up: 1 / 0)
        assert found() == "ZeroDivisionError: division by zero"
    activation_rounding.trial_failure_reason.cache_clear()


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", "fp8"),
        ("starcoder2", "int8"),
        *slow(("gemma2", "int8"), ("qwen3_5", "fp8"), ("deepseek_v2-lite", "fp8"), ("falcon_h1", "int8")),
    ],
)
def test_model_logprobs_are_equal_with_and_without_fused_rounding(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and gates round; the kernels that only round have less to do."""
    if INTERPRETED:
        monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(batch_sampler, "choose_sampler", lambda device, argmax, draw, group: sample_on_device)
    path = save_tiny_model(tmp_path, family, hidden_size=128, intermediate_size=256)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 36)]
    counts = {"round_rows": 0, "norm_and_round": 0, "gate_and_round": 0}
    for name in counts:
        method = getattr(EightBitRounding, name)

        def counted(form: EightBitRounding, *args: Any, name: str = name, method: Any = method, **named: Any) -> Any:
            counts[name] += 1
            return method(form, *args, **named)

        monkeypatch.setattr(EightBitRounding, name, counted)

    def answers() -> list[Any]:
        kept = {"num_kv_blocks": 64, "max_num_batched_tokens": 32, "attention_backend": "triton"}
        config = EngineConfig(model=str(path), quantization=quantization, **kept)
        requests = [request(str(i), prompt, max_tokens=3, logprobs=2) for i, prompt in enumerate(prompts)]
        counts.update(dict.fromkeys(counts, 0))
        found = run(EngineCore(config), requests)
        return [(found[str(i)].ids, found[str(i)].logprobs) for i in range(len(prompts))]

    fused = answers()
    assert counts["norm_and_round"] > 0
    assert family == "starcoder2" or counts["gate_and_round"] > 0
    rounded_alone = counts["round_rows"]
    monkeypatch.setattr(activation_rounding, "can_fuse", lambda *_: False)
    assert answers() == fused
    assert counts["norm_and_round"] == counts["gate_and_round"] == 0
    assert counts["round_rows"] > rounded_alone
