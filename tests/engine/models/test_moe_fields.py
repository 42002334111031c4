"""gpt-oss and other MoE models: MXFP4, batch invariance (promise 2), adapters, drafts, and rejected configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import AdapterError, ModelError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_files import read_adapter_specs
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.worker.loading.weight_check import check_weights
from quire.kernels.cpu.backend import CpuBackend
from tests.adapters import merge, save_adapter
from tests.engine.harness import Answer, request, run
from tests.quantized_models import stack_mxfp4
from tests.tiers import slow
from tests.tiny_models import VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BACKENDS = ["reference", pytest.param("cpu", marks=compiled)]


def engine(path: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **{"num_kv_blocks": 96} | options))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 18, 40, 77, 33)]


def told(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.ids, [each.logprob for each in answer.logprobs]


def row(answer: Answer) -> torch.Tensor:
    assert answer.prompt_logprobs is not None
    return torch.tensor([each.logprob for each in answer.prompt_logprobs if each is not None])


def theirs(path: Path, prompt: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_mxfp4_gpt_oss_logprobs_equal_transformers(backend: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "dense", "gpt_oss")
    packed, prompt = stack_mxfp4(folder, tmp_path / "packed"), prompts()[4]
    stored, dense = load_file(packed / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    numbers = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    assert torch.equal(numbers, dense[name])
    requests = request("a", prompt, max_tokens=1, prompt_logprobs=0)
    served = engine(packed, attention_backend=backend, dtype="float32")
    actual, expected = row(run(served, [requests])["a"]), theirs(folder, prompt)
    assert served.info.quantization.startswith("mxfp4, 4 bits")
    whole = engine(folder, attention_backend=backend, dtype="float32").info.weight_bytes
    assert served.info.weight_bytes < 0.5 * whole, "experts are read as they are stored"
    if backend == "reference":
        assert actual == pytest.approx(expected, abs=1e-4)
    else:  # the CPU backend rounds the activations of 4-bit weights to 8 bits
        assert (actual - expected).abs().mean() < 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_bfloat16_moe_logprobs_are_close_to_float32(family: str, backend: str, tmp_path: Path) -> None:
    path, prompt = save_tiny_model(tmp_path, family, dtype=torch.bfloat16), prompts()[4]
    served = engine(path, attention_backend=backend)
    assert served.info.dtype == "bfloat16"
    actual = row(run(served, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"])
    assert (actual - theirs(path, prompt)).abs().mean() < 0.05


@compiled
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
def test_mxfp4_outputs_do_not_depend_on_batching_or_preemption(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stack_mxfp4(save_tiny_model(tmp_path / "dense", "gpt_oss", dtype=torch.bfloat16), tmp_path / "packed")
    requests = [request(str(i), prompt, max_tokens=24, logprobs=0) for i, prompt in enumerate(prompts())]
    together = engine(path, dtype=dtype)

    def answers(some: EngineCore) -> dict[str, tuple[list[int], list[float]]]:
        return {name: told(each) for name, each in run(some, requests).items()}

    expected = answers(together)
    assert (together.executor._model._recorded_layers[1] is not None) == CpuBackend().prefers_native_linear(
        getattr(torch, dtype)
    )
    again = run(together, requests)
    assert any(each.cached_tokens for each in again.values())
    assert {name: told(each) for name, each in again.items()} == expected
    alone = engine(path, dtype=dtype, enable_prefix_caching=False)
    for each in requests:
        assert told(run(alone, [each])[each.id]) == expected[each.id]
    assert answers(engine(path, dtype=dtype, max_num_batched_tokens=7)) == expected
    small_engine = engine(path, dtype=dtype, num_kv_blocks=12, max_model_len=128)
    assert answers(small_engine) == expected
    assert small_engine.engine_stats.preemptions > 0
    speculative_config = {"method": "ngram", "num_speculative_tokens": 3}
    assert answers(engine(path, dtype=dtype, speculative_config=speculative_config)) == expected
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert answers(engine(path, dtype=dtype)) == expected


def test_moe_draft_model_does_not_change_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "whole", "gpt_oss")
    small = save_tiny_model(tmp_path / "small", "qwen3-moe", num_hidden_layers=2)
    requests = [request(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts()[:3])]
    speculative_config = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    plain, drafted = run(engine(path), requests), run(engine(path, speculative_config=speculative_config), requests)
    assert [each.ids for each in drafted.values()] == [each.ids for each in plain.values()]


def test_lora_on_moe_attention_is_served_and_on_experts_rejected(tmp_path: Path) -> None:
    path, prompt = save_tiny_model(tmp_path / "model", "gpt_oss"), prompts()[3]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    folder = save_adapter(tmp_path / "a", base, 4, targets=("q_proj", "v_proj", "o_proj"), seed=4)
    modules = adaptable_modules(read_model_config(path))
    (tmp_path / "spool").mkdir()
    adapter = AdapterStore(tmp_path / "spool", modules, 8).add_adapter("a", str(folder))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    requests = [
        EngineCoreRequest(id=str(of), prompt_ids=prompt, params=params, seed=0, adapter=of) for of in (None, adapter)
    ]
    served = engine(path, dtype="float32", enable_lora=True, max_lora_rank=8)
    plain, adapted = run(served, requests).values()
    assert row(plain) == pytest.approx(theirs(path, prompt), abs=1e-4)
    with torch.inference_mode():
        logprobs = merge(base, folder)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    assert row(adapted) == pytest.approx(expected, abs=1e-4)
    assert (row(adapted) - row(plain)).abs().max() > 0.1
    tensor_name = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
    save_file({tensor_name: torch.zeros(4, 64)}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"experts\.0\.up_proj.*adapters of experts are not served"):
        read_adapter_specs(folder, modules, 8)


def test_check_weights_rejects_mxfp4_tensor_of_wrong_shape(tmp_path: Path) -> None:
    path = stack_mxfp4(save_tiny_model(tmp_path / "dense", "gpt_oss"), tmp_path / "packed")
    config, checkpoint = read_model_config(path), engine(path)._expected_weights
    check_weights(checkpoint, config, path, path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name][:, :, :2].contiguous()}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.0\.down_proj\.weight_packed has shape"):
        check_weights(checkpoint, config, path, path)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 5 experts"),
        ("mixtral", {"num_local_experts": None}, "lacks num_local_experts"),
        ("mixtral", {"num_local_experts": 4096, "num_hidden_layers": 4096}, "4096 experts in each of 4096 layers"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ("qwen3-moe", {"num_local_experts": 7}, r"mlp\.gate\.weight has shape"),
        ("gpt_oss", {"num_local_experts": 4}, r"the model does not have|has shape"),
    ],
)
def test_contradictory_moe_config_is_named_in_error(family: str, change: dict, says: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, num_hidden_layers=2)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ModelError, match=says):
        engine(path)
