"""--kv-cache-dtype: tokens do not depend on how they were computed; memory, checkpoint scales, rejected settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.worker.loading.kv_scales import read_kv_scales
from quire.kernels.backend_selection import AttentionRequirements, select_backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.kv_quantization import KVScales
from tests.engine.harness import Answer, request, run
from tests.quantized_models import compressed_config, int8, quantize_checkpoint
from tests.tiers import pair_in_rotation
from tests.tiny_models import VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
held = pytest.mark.parametrize("kv", ["int8", "fp8", "bfloat16"])
BACKENDS = ["reference", pytest.param("cpu", marks=compiled)]


def engine(path: Path, kv: str, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), kv_cache_dtype=kv, **{"num_kv_blocks": 96} | options))


def tokens(answers: dict[str, Answer]) -> dict[str, tuple[list[int], list[float]]]:
    return {name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in answers.items()}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 18, 40, 77, 33)]


@pytest.mark.few(1)
@compiled
@held
@pytest.mark.parametrize(  # windows, caps, sinks, states, latents
    ("family", "dtype"),
    [
        *pair_in_rotation(
            ["llama", "gemma2", "gemma3", "gpt_oss", "lfm2", "qwen3_5", "deepseek_v3"], ["float32", "bfloat16"]
        ),
        ("llama", "bfloat16"),
    ],
)
def test_tokens_are_equal_alone_together_chunked_cached_and_preempted(
    dtype: str, family: str, kv: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    requests = [request(str(i), prompt, max_tokens=24, logprobs=0) for i, prompt in enumerate(prompts())]
    together = engine(path, kv, dtype=dtype)
    expected = tokens(run(together, requests))
    assert (together.executor._model._recorded_layers[1] is not None) == CpuBackend().prefers_native_linear(
        getattr(torch, dtype)
    )
    alone = engine(path, kv, dtype=dtype, enable_prefix_caching=False)
    for each in requests:
        assert tokens(run(alone, [each]))[each.id] == expected[each.id]
    assert tokens(run(engine(path, kv, dtype=dtype, max_num_batched_tokens=7), requests)) == expected
    cached_answers = run(together, requests)
    assert any(each.cached_tokens for each in cached_answers.values())
    assert tokens(cached_answers) == expected
    few = engine(path, kv, dtype=dtype, num_kv_blocks=12, max_model_len=128)
    assert tokens(run(few, requests)) == expected
    assert few.engine_stats.preemptions > 0
    guessing = engine(path, kv, dtype=dtype, speculative_config="ngram")
    assert tokens(run(guessing, requests)) == expected


@compiled
@held
def test_fused_layers_give_same_bits(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    requests = [request(str(i), prompt, max_tokens=8, logprobs=0) for i, prompt in enumerate(prompts() * 3)]
    together = tokens(run(engine(path, kv), requests))
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert tokens(run(engine(path, kv), requests)) == together


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv", "bound"), [("int8", 0.05), ("fp8", 0.3), ("bfloat16", 0.03)])
def test_quantized_kv_cache_keeps_logprobs_close(backend: str, kv: str, bound: float, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen2")
    prompt = request("a", prompts()[4], max_tokens=1, prompt_logprobs=0)

    def logprobs(kv: str) -> torch.Tensor:
        found = run(engine(path, kv, dtype="float32", attention_backend=backend), [prompt])["a"].prompt_logprobs
        assert found is not None
        return torch.tensor([each.logprob for each in found if each is not None])

    change = (logprobs(kv) - logprobs("auto")).abs().mean()
    assert 0 < change < bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv", "head"), [("auto", 64), ("int8", 34), ("fp8", 32), ("fp8_e4m3", 32), ("bfloat16", 64)])
def test_kv_memory_arithmetic_equals_allocated_blocks(backend: str, kv: str, head: int, tmp_path: Path) -> None:
    """2 heads of 32 numbers, bfloat16. `head`: bytes per head."""
    path = save_tiny_model(tmp_path, "llama", head_dim=32)
    made = engine(path, kv, dtype="bfloat16", attention_backend=backend, num_kv_blocks=None, kv_cache_memory=0.001)
    page = 2 * 16 * 2 * head * 3
    assert made.executor._kv_tensors[0].nbytes == made.info.num_blocks * page
    assert f"{page / 1024:,.0f} KiB per block" in made.info.arithmetic
    if kv == "int8":
        assert "x (32 + 2) x 1 B" in made.info.arithmetic


@pytest.mark.slow
def test_llm_serves_int8_kv_cache_and_rejects_int4() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm = LLM(kv_cache_dtype="int8", num_kv_blocks=64)
    assert len(llm.generate("Once upon a time", params)[0].outputs[0].token_ids) == 4
    llm.close()
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'int4'.*argument"):
        LLM(kv_cache_dtype="int4")


def save_model_with_kv_scales(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A compressed-tensors checkpoint with these extra tensors."""
    path = quantize_checkpoint(
        save_tiny_model(folder, "llama"),
        folder / "scaled",
        int8("channel"),
        compressed_config("int-quantized", 8, 0, strategy="channel"),
    )
    save_file(load_file(path / "model.safetensors") | scales, path / "model.safetensors")
    return path


def test_checkpoint_kv_scales_apply_to_layers(tmp_path: Path) -> None:
    attention = "model.layers.{}.self_attn.{}"
    scales = {
        attention.format(0, "k_scale"): torch.tensor([0.5]),
        attention.format(0, "v_scale"): torch.tensor(0.25),
        attention.format(2, "k_proj.output_scale"): torch.tensor([0.125, 2.0]),
    }
    path = save_model_with_kv_scales(tmp_path, scales)
    made = engine(path, "fp8")
    kv_scales = [layer[0].rope_params.kv_scales for layer in made.executor._model._layers]
    assert kv_scales == [KVScales(0.5, 0.25), KVScales(), KVScales(2.0, 1.0)]
    prompt = request("a", prompts()[3], max_tokens=8, logprobs=0)
    # A power of two changes no 8-bit float of ordinary size, so the log probabilities show whether both ends use the
    # scale.
    plain = save_model_with_kv_scales(tmp_path / "plain", {})
    actual, unscaled = (run(each, [prompt])["a"].logprobs for each in (made, engine(plain, "fp8")))
    assert [a.logprob for a in actual] == pytest.approx([b.logprob for b in unscaled], abs=0.1)
    assert read_kv_scales(plain) == {}


def test_checkpoint_with_only_kv_scales_loads(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    scale = {"model.layers.1.self_attn.k_scale": torch.tensor([0.5])}
    save_file(load_file(path / "model.safetensors") | scale, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": kv}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    made = engine(path, "fp8")
    assert made.executor._model._layers[1][0].rope_params.kv_scales == KVScales(0.5, 1.0)
    assert run(made, [request("a", prompts()[3], max_tokens=8)])["a"].ids


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_invalid_kv_scale_raises_model_error(scale: float, tmp_path: Path) -> None:
    path = save_model_with_kv_scales(tmp_path, {"model.layers.1.self_attn.v_scale": torch.tensor([scale])})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_scale"):
        engine(path, "fp8")


def test_backend_without_quantized_kv_is_skipped_or_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(Flash2Backend, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(Flash2Backend, "description", lambda _: "flash-attn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match=r"flash: keeps keys and values .*; --attention-backend triton"):
        select_backend(gpu, torch.bfloat16, 64, "flash", AttentionRequirements(kv_dtype=torch.int8))
    assert (
        select_backend(gpu, torch.bfloat16, 64, "flash", AttentionRequirements(kv_dtype=torch.bfloat16))[0].name
        == "flash"
    )
    backend, why = select_backend(gpu, torch.bfloat16, 64, attention=AttentionRequirements(kv_dtype=torch.int8))
    assert backend.name == "triton"
    assert "flash: keeps keys and values" in why
