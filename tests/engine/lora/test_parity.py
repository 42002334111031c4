"""LoRA adapters give the tokens and logprobs of the model with the adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.tiers.tiered_offloader import TieredKVOffloader
from tests.adapters import ALL, merge, save_adapter
from tests.engine.harness import run
from tests.tiny_models import save_tiny_model

RANKS = (1, 3, 8, 16, 64)


def spool(root: Path, model: Path, **options: int) -> AdapterStore:
    root.mkdir(exist_ok=True)
    return AdapterStore(root, adaptable_modules(read_model_config(model)), options.get("max_rank", 64))


def engine(model: Path, make_drafter: Any = None, make_tiers: Any = TieredKVOffloader, **options: object) -> EngineCore:
    settings = {"model": str(model), "dtype": "float32", "max_lora_rank": 64, "num_kv_blocks": 256, "enable_lora": True}
    config = EngineConfig(**(settings | options))  # type: ignore[arg-type]
    return EngineCore(config, make_drafter=make_drafter, make_tiers=make_tiers)


def asked(name: str, prompt: Sequence[int], adapter: Adapter | None, **params: object) -> EngineCoreRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2} | params
    return EngineCoreRequest(id=name, prompt_ids=list(prompt), params=SamplingParams(**params), seed=0, adapter=adapter)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (5 + 3 * i,), generator=generator).tolist() for i in range(count)]


@torch.no_grad()
def check(merged: torch.nn.Module, prompt: list[int], answer: object, tolerance: float = 1e-4) -> None:
    """Logprobs of prompt and answer equal the merged model's, and each token is the likeliest."""
    ids = torch.tensor([prompt + answer.ids])
    logprobs = torch.log_softmax(merged(ids).logits[0].double(), dim=-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    actual = [each.logprob for each in (*answer.prompt_logprobs[1:], *answer.logprobs)]
    assert actual == pytest.approx(expected, abs=tolerance)
    best = logprobs[len(prompt) - 1 : -1].max(-1).values
    picked = torch.tensor(expected[len(prompt) - 1 :], dtype=torch.float64)
    assert (best - picked < 2 * tolerance).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama", "llama-tied-biased", "qwen3", "gemma3", "gemma2"])
def test_lora_logprobs_equal_merged_weights_alone_and_in_batch(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    store = spool(tmp_path / "spool", path)
    folders = [save_adapter(tmp_path / f"a{rank}", base, rank, seed=rank) for rank in RANKS]
    folders.append(save_adapter(tmp_path / "few", base, 4, targets=("q_proj", "up_proj"), use_rslora=True, seed=7))
    both = (*ALL, "embed_tokens", "lm_head")
    folders.append(save_adapter(tmp_path / "head", base, 8, targets=both, seed=8, size=0.3))
    adapters = [None, *(store.add_adapter(folder.name, str(folder)) for folder in folders)]
    texts = prompts(16)
    requests = [asked(f"r{i}", texts[i], adapters[i % len(adapters)]) for i in range(16)]
    together = run(engine(path), requests)
    for index, adapter in enumerate(adapters):
        merged = base if adapter is None else merge(deepcopy(base), folders[index - 1])
        for at in range(index, 16, len(adapters)):
            check(merged, texts[at], together[f"r{at}"])
    single = engine(path, enable_prefix_caching=False)
    for request in requests:
        alone = run(single, [request])[request.id]
        assert (alone.ids, alone.logprobs) == (together[request.id].ids, together[request.id].logprobs)
        assert alone.prompt_logprobs == together[request.id].prompt_logprobs
    plain = run(engine(path, enable_lora=False), [requests[0]])["r0"]
    assert (plain.ids, plain.logprobs) == (together["r0"].ids, together["r0"].logprobs)


JOINED = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "glm4": ("q_proj", "k_proj", "gate_up_proj"),
    "gptj": ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_bigcode": ("c_attn", "c_proj"),
    "falcon-newer": ("query_key_value", "dense_h_to_4h"),
    "opt": ("q_proj", "out_proj", "fc1", "fc2"),
    "stablelm": ALL,
    "arcee": ("k_proj", "up_proj", "down_proj"),
    "qwen3_5": ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "up_proj"),
    "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "lfm3": ("q_proj", "o_proj", "g_proj", "in_proj", "out_proj", "w1", "w2"),
    "mamba2": ("in_proj", "out_proj"),
    "mamba": ("in_proj", "x_proj", "out_proj"),
    "jamba-dense": ("q_proj", "in_proj", "x_proj", "out_proj", "gate_proj", "down_proj"),
    "nemotron_h": ("q_proj", "in_proj", "out_proj", "up_proj", "down_proj"),
    "nemotron_h-latent": ("q_proj", "in_proj", "fc1_latent_proj", "fc2_latent_proj"),
    "falcon_h1": ("q_proj", "o_proj", "in_proj", "out_proj", "gate_proj", "down_proj"),
    "zamba2": ("q_proj", "o_proj", "in_proj", "out_proj", "gate_up_proj", "down_proj", "linear"),
    "granite-hybrid-dense": ("q_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    "youtu": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"),
    "deepseek_v2-dense": ("q_proj", "o_proj"),
    "gemma4": ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
    "gemma4-small": ("q_proj", "k_proj", "up_proj", "per_layer_input_gate", "per_layer_projection"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("family", JOINED)
def test_lora_on_fused_or_renamed_linears_equals_merged_weights(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    options = {"fan_in_fan_out": True} if family == "gpt2" else {}
    folder = save_adapter(tmp_path / "a", base, 8, targets=JOINED[family], seed=3, **options)
    adapter = spool(tmp_path / "spool", path).add_adapter("a", str(folder))
    requests = [asked(f"r{i}", prompt, adapter if i % 2 else None) for i, prompt in enumerate(prompts(4))]
    together = run(engine(path), requests)
    merged = merge(deepcopy(base), folder)
    for i, prompt in enumerate(prompts(4)):
        check(merged if i % 2 else base, prompt, together[f"r{i}"])
