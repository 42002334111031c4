"""--quantization: the quantized weights, and tokens that do not depend on how they were computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.layers.schemes.online_quantization import quantize_float8, quantize_int4, quantize_int8
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import Answer, request, run
from tests.tiny_models import FAMILIES, VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def engine(path: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **{"num_kv_blocks": 96, "dtype": "bfloat16"} | options))


def tokens(answers: dict[str, Answer]) -> dict[str, tuple[list[int], list[float]]]:
    return {name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in answers.items()}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 18, 40, 77, 33)]


@pytest.mark.few(2)
@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_equal_alone_together_chunked_cached_and_preempted(
    quantization: str, dtype: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, "llama")
    options = {"quantization": quantization, "dtype": dtype}
    requests = [request(str(i), prompt, max_tokens=24, logprobs=0) for i, prompt in enumerate(prompts())]
    together = engine(path, **options)
    expected = tokens(run(together, requests))
    assert together.executor._model._recorded_layers[1] is not None
    alone = engine(path, **options, enable_prefix_caching=False)
    for each in requests:
        assert tokens(run(alone, [each]))[each.id] == expected[each.id]
    assert tokens(run(engine(path, **options, max_num_batched_tokens=7), requests)) == expected
    cached_answers = run(together, requests)
    assert any(each.cached_tokens for each in cached_answers.values())
    assert tokens(cached_answers) == expected
    few = engine(path, **options, num_kv_blocks=12, max_model_len=128)
    assert tokens(run(few, requests)) == expected
    assert few.engine_stats.preemptions > 0


@pytest.mark.few(5)
@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_give_same_bits(
    family: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, family)
    requests = [request(str(i), prompt, max_tokens=8, logprobs=0) for i, prompt in enumerate(prompts() * 3)]
    together = tokens(run(engine(path, quantization=quantization), requests))
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert tokens(run(engine(path, quantization=quantization), requests)) == together


@pytest.mark.few(4)
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=compiled)])
@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.15), ("int4", 0.6), ("fp8", 0.5)])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_online_quantization_keeps_logprobs_close(
    backend: str, quantization: str, bound: float, load_format: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, "qwen2")
    options = {"attention_backend": backend, "dtype": "float32", "load_format": load_format}
    prompt = request("a", prompts()[4], max_tokens=1, prompt_logprobs=0)

    def logprobs(**more: object) -> torch.Tensor:
        found = run(engine(path, **options, **more), [prompt])["a"].prompt_logprobs
        assert found is not None
        return torch.tensor([each.logprob for each in found if each is not None])

    change = (logprobs(quantization=quantization) - logprobs()).abs().mean()
    assert 0 < change < bound


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=compiled)])
def test_engine_info_describes_online_quantization(backend: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    info = engine(path, attention_backend=backend, quantization="int4").info
    assert info.quantization.startswith("int4 at load")
    assert ("held in bfloat16" in info.quantization) == (backend == "reference")
    whole = engine(path, attention_backend=backend).info.weight_bytes
    assert (info.weight_bytes < 0.6 * whole) == (backend == "cpu")


def test_quantize_int8_rounds_to_nearest() -> None:
    weight = torch.randn((70, 96), generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    quantized = quantize_int8(weight)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((quantized.dequantize() - weight.float()).abs() <= step * 0.501).all()


def test_quantize_float8_rounds_to_nearest() -> None:
    weight = torch.randn((70, 96), generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    weight[4] *= 1e-3
    dequantized = quantize_float8(weight).dequantize()
    peak = weight.float().abs().amax(1, keepdim=True)
    # Half a step of 3 bits, or of subnormal numbers.
    allowed = (weight.float().abs() / 16).clamp_min(peak / 448 * 2.0**-10)
    assert ((dequantized - weight.float()).abs() <= allowed * 1.01).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=compiled)])
@pytest.mark.parametrize("family", ["llama", "llama-tied-biased"])
def test_quantize_embedding_is_independent_of_quantization(backend: str, family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    requests = [request("a", prompts()[3], max_tokens=1, prompt_logprobs=0)]

    def logprobs(**options: object) -> tuple[list[float], str, int]:
        made = engine(path, attention_backend=backend, dtype="float32", **options)
        found = run(made, requests)["a"].prompt_logprobs
        assert found is not None
        return [each.logprob for each in found if each is not None], made.info.quantization, made.info.weight_bytes

    none, both = logprobs(), logprobs(quantization="fp8")
    body, table = (
        logprobs(quantization="fp8", quantize_embedding=False),
        logprobs(quantize_embedding=True),
    )
    assert len({tuple(each[0]) for each in (none, both, body, table)}) == 4
    assert body[1].startswith("fp8 at load, embedding and head whole")
    assert table[1].startswith("embedding and head int8")
    if backend == "cpu":
        assert both[2] < body[2] < none[2]
        assert both[2] < table[2] < none[2]
        assert none[2] - body[2] == pytest.approx(table[2] - both[2], abs=4)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
@pytest.mark.parametrize("heavy", [False, True])
def test_quantize_int4_beats_rounding_to_nearest(heavy: bool, scale: float) -> None:
    weight = torch.randn((64, 256), generator=torch.Generator().manual_seed(1))
    weight = (weight**3 if heavy else weight) * scale
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = (high - low) / 15
    nearest = ((groups - low) / step).round() * step + low
    quantized = quantize_int4(weight, ReferenceBackend())
    error = (quantized.dequantize() - weight).square().sum()
    assert error < 0.95 * (nearest - groups).square().sum()
    by_group = (quantized.dequantize().view_as(groups) - groups).square().sum(2)
    assert (by_group <= (nearest - groups).square().sum(2) * 1.01 + 1e-12).all()


def test_quantize_int4_is_exact_for_16_values_per_group() -> None:
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(2)).float()
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = codes * 0.25 - 1.5
    weight[0] = 0.0
    weight[1] = 0.375
    assert torch.equal(quantize_int4(weight, ReferenceBackend()).dequantize(), weight)
    assert quantize_int4(weight[:, :30], ReferenceBackend()).bits == 8


def test_online_quantization_of_quantized_checkpoint_is_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for method in ("int8", "awq"):
        with pytest.raises(ConfigError, match=f"quantization: {method} was given, but .* are gptq"):
            engine(path, quantization=method)


def test_vllm_quantization_name_must_match_checkpoint(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"quantization: gptq_marlin was given, but .* are not quantized"):
        engine(path, quantization="gptq_marlin")
    assert EngineConfig(quantization="fp8").without_redundant_quantization("fp8").quantization is None
    assert EngineConfig(quantization="fp8").without_redundant_quantization("gptq").quantization == "fp8"
    assert EngineConfig(quantization="gptq_marlin").required_checkpoint_quant_method == "gptq"
    assert EngineConfig(quantization="int4").required_checkpoint_quant_method is None
