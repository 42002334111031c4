"""MoE families and Gemma 4: logprobs against float64 transformers, batch invariance (promise 2), quantization, LoRA on
shared experts, and rejected config fields.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.errors import ModelError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.models import decoder_spec
from quire.kernels.cpu.backend import CpuBackend
from tests.adapters import merge, save_adapter
from tests.engine.harness import request, run
from tests.engine.models.test_moe_fields import engine, prompts, row, told
from tests.tiny_models import save_tiny_model

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FAMILIES = ["glm4_moe", "qwen2-moe", "phimoe", "ernie4_5_moe", "flex_olmo", "granitemoe_swa", "hunyuan_v1_moe"]
FAMILIES += ["gemma4", "gemma4-small", "gemma4-moe", "lfm2_moe", "llama4", "llama4-plain", "minimax_m2", "dots1"]
FAMILIES += ["exaone_moe", "mellum", "solar_open", "olmoe", "deepseek_v2", "deepseek_v2-lite", "deepseek_v3"]
FAMILIES += ["glm4_moe_lite", "nemotron_h-latent"]
SERVED = [(family, {"dtype": "bfloat16"}) for family in FAMILIES]
SERVED += [
    (family, settings) for settings in ({"dtype": "float32"}, {"quantization": "int4"}) for family in FAMILIES[::3]
]
"""Routing depends on the family, and the experts' kernels on the type of weights."""


def theirs(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0].float()


@pytest.mark.parametrize("family", ["glm4_moe", "llama4", "nemotron_h-latent"])
def test_moe_logprobs_equal_float64_transformers(family: str, tmp_path: Path) -> None:
    """The first tier's sample of MoE families; test_parity.py has all of them."""
    path, prompt = save_tiny_model(tmp_path, family), prompts()[4]
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    served = engine(path, dtype="float32")
    assert row(run(served, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]) == pytest.approx(
        theirs(reference, prompt), abs=5e-5
    )


@compiled
@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "settings"), SERVED, ids=str)
def test_moe_outputs_do_not_depend_on_batching_or_preemption(
    family: str, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, family, dtype=torch.bfloat16)
    requests = [request(str(i), prompt, max_tokens=24, logprobs=0) for i, prompt in enumerate(prompts())]

    def answers(some: EngineCore) -> dict[str, tuple[list[int], list[float]]]:
        return {name: told(each) for name, each in run(some, requests).items()}

    together = engine(path, **settings)
    expected = answers(together)
    # Layers are not recorded without native kernels for this weight type: float32 on a processor without AVX-512.
    is_native = "quantization" in settings or CpuBackend().prefers_native_linear(getattr(torch, settings["dtype"]))
    assert (together.executor._model._recorded_layers[1] is not None) == is_native
    again = run(together, requests)
    assert any(each.cached_tokens for each in again.values())
    assert {name: told(each) for name, each in again.items()} == expected
    alone = engine(path, **settings, enable_prefix_caching=False)
    for each in requests:
        assert told(run(alone, [each])[each.id]) == expected[each.id]
    assert answers(engine(path, **settings, max_num_batched_tokens=7)) == expected
    small_engine = engine(path, **settings, num_kv_blocks=12, max_model_len=128)
    assert answers(small_engine) == expected
    assert small_engine.engine_stats.preemptions > 0
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    assert answers(engine(path, **settings)) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2-moe", "glm4_moe", "granitemoeshared", "hunyuan_v1_moe", "llama4"])
def test_lora_on_shared_experts_equals_merged_model(family: str, tmp_path: Path) -> None:
    path, prompt = save_tiny_model(tmp_path / "model", family), prompts()[3]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    modules = adaptable_modules(read_model_config(path))
    targets = sorted({name.rpartition(".")[2] for name in modules if ".shared" in name})
    assert targets
    folder = save_adapter(tmp_path / "a", base, 4, targets=tuple(targets), seed=4)
    (tmp_path / "spool").mkdir()
    adapter = AdapterStore(tmp_path / "spool", modules, 8).add_adapter("a", str(folder))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    requests = [
        EngineCoreRequest(id=str(of), prompt_ids=prompt, params=params, seed=0, adapter=of) for of in (None, adapter)
    ]
    plain, adapted = run(engine(path, dtype="float32", enable_lora=True, max_lora_rank=8), requests).values()
    assert row(plain) == pytest.approx(theirs(base, prompt), abs=1e-4)
    assert row(adapted) == pytest.approx(theirs(merge(base, folder), prompt), abs=1e-4)
    assert (row(adapted) - row(plain)).abs().max() > 0.05


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("glm4_moe", {"n_group": 5}, "n_group, topk_group: 12 experts in 5 groups"),
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 4}, "4 experts of 1 groups of 3"),
        ("qwen2-moe", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv of an 'olmoe' is not supported"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: 3, where a 'phimoe' has 2"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, "moe_topk"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min: at most 1e-06 is served, got 0.1"),
    ],
)
def test_unsupported_moe_config_is_named_in_error(family: str, change: dict, says: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(ModelError, match=says):
        engine(path)


def test_hunyuan_moe_list_of_equal_topk_reads_as_one_value(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "hunyuan_v1_moe")
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"moe_topk": [2, 2, 2], "moe_intermediate_size": [160] * 3}))
    spec = decoder_spec(read_model_config(path))
    assert [each.routing.top_k for each in spec.sublayers_of_kind(MoELayerSpec)] == [2, 2, 2]


def test_mtp_layers_in_checkpoint_are_ignored_without_drafting(tmp_path: Path) -> None:
    path, prompt = save_tiny_model(tmp_path, "glm4_moe", num_mtp_layers=1), prompts()[1]
    tensors = load_file(path / "model.safetensors")
    more = {
        name.replace("layers.2.", "layers.3."): each.clone() for name, each in tensors.items() if "layers.2." in name
    }
    requests = request("a", prompt, max_tokens=2, prompt_logprobs=0)
    before = row(run(engine(path), [requests])["a"])
    save_file(tensors | more | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}, path / "model.safetensors")
    assert torch.equal(row(run(engine(path), [requests])["a"]), before)
