"""LoRA on transformers' classes: the numbers of PEFT and of merged weights, and batch invariance (promise 2)."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.engine.common.errors import AdapterError
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.local_adapters import LoRARequest
from tests.adapters import merge, save_adapter
from tests.engine.harness import run
from tests.engine.lora.test_parity import asked, check, engine, prompts
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import save_tiny_model

LINEARS: dict[str, tuple[str, ...]] = {
    "olmo": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
    "laguna": ("q_proj", "k_proj", "v_proj", "o_proj"),  # its MLPs are experts
    "persimmon": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gemma4_unified_text": ("q_proj", "o_proj", "gate_proj", "per_layer_input_gate", "per_layer_projection"),
    "axk1": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "roberta": ("query", "value"),
    "nanochat": ("q_proj", "k_proj", "o_proj", "fc1", "fc2"),
}


def save_model(path: Path, kind: str) -> Path:
    path.mkdir()
    save_tiny_class(path, kind)
    return path


def load_float64_model(path: Path, dtype: torch.dtype = torch.float64) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **eager).eval()


def spool(root: Path, serving: Any) -> AdapterStore:
    root.mkdir()
    return AdapterStore(root, serving.info.adaptable, 64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LINEARS)
def test_lora_on_transformers_class_equals_merged_weights(kind: str, tmp_path: Path) -> None:
    """Bitwise equal in a batch with other adapters and with none, alone, in chunks, and after cached prefixes."""
    path = save_model(tmp_path / "model", kind)
    base = load_float64_model(path)
    folders = [save_adapter(tmp_path / f"a{rank}", base, rank, targets=LINEARS[kind], seed=rank) for rank in (3, 16)]
    serving = engine(path)
    store = spool(tmp_path / "spool", serving)
    adapters = [None, *(store.add_adapter(folder.name, str(folder)) for folder in folders)]
    requests = [asked(f"r{i}", prompt, adapters[i % 3]) for i, prompt in enumerate(prompts(6))]
    together = run(serving, requests)
    models = [base, *(merge(deepcopy(base), folder) for folder in folders)]
    for i, request in enumerate(requests):
        if kind != "roberta":  # roberta's positions begin after its padding
            check(models[i % 3], request.prompt_ids, together[request.id])
    narrow = engine(path, max_num_batched_tokens=16, num_kv_blocks=16)
    for request in requests:
        alone = run(narrow, [request])[request.id]
        assert (alone.ids, alone.logprobs) == (together[request.id].ids, together[request.id].logprobs)
        assert alone.prompt_logprobs == together[request.id].prompt_logprobs
    small_engine = engine(path, max_num_batched_tokens=16, num_kv_blocks=7, max_model_len=80)
    longer = [asked(each.id, each.prompt_ids, each.adapter, max_tokens=40) for each in requests]
    expected = {name: each.ids for name, each in run(serving, longer).items()}
    assert {name: each.ids for name, each in run(small_engine, longer).items()} == expected
    assert small_engine.engine_stats.preemptions
    again = run(serving, [asked(each.id, each.prompt_ids, each.adapter, prompt_logprobs=None) for each in requests])
    assert any(answer.cached_tokens for answer in again.values())
    assert {name: each.logprobs for name, each in again.items()} == {n: each.logprobs for n, each in together.items()}
    plain = run(engine(path, enable_lora=False), requests[:1])["r0"]
    assert (plain.ids, plain.logprobs) == (together["r0"].ids, together["r0"].logprobs)


def test_lora_on_gpt2_conv1d_class_equals_merged_weights(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "gpt2")
    options = {"fan_in_fan_out": True}
    folder = save_adapter(
        tmp_path / "a", load_float64_model(path), 8, targets=("c_attn", "c_fc", "c_proj"), seed=3, **options
    )
    serving = engine(path, model_impl="transformers")
    adapter = spool(tmp_path / "spool", serving).add_adapter("a", str(folder))
    prompt = prompts(3)[2]
    check(merge(load_float64_model(path), folder), prompt, run(serving, [asked("r", prompt, adapter)])["r"])


def test_peft_adapter_on_transformers_class_equals_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    path = save_model(tmp_path / "model", "olmo")
    config = peft.LoraConfig(r=5, lora_alpha=12, init_lora_weights=False, target_modules="all-linear", use_rslora=True)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(load_float64_model(path, torch.float32), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    serving = engine(path)
    adapter = spool(tmp_path / "spool", serving).add_adapter("x", str(tmp_path / "adapter"))
    requests = [asked(f"r{index}", ids, adapter) for index, ids in enumerate(prompts(4))]
    answers = run(serving, requests)
    for request in requests:
        check(adapted.eval().double(), request.prompt_ids, answers[request.id])


def test_llm_serves_lora_on_class_and_rejects_unknown_tensors(tmp_path: Path) -> None:
    """Adapters of other models and of embeddings are rejected by the tensor's name."""
    path = save_model(tmp_path / "model", "laguna")
    llm = LLM(str(path), num_kv_blocks=32, enable_lora=True, skip_tokenizer_init=True)
    base, params = load_float64_model(path), SamplingParams(max_tokens=4, temperature=0)
    folder = save_adapter(tmp_path / "good", base, 4, targets=("q_proj",), seed=1)
    prompt = {"prompt_token_ids": list(range(3, 20))}
    adapted_tokens = (
        llm.generate(prompt, params, lora_request=LoRARequest("good", 1, str(folder)))[0].outputs[0].token_ids
    )
    assert adapted_tokens != llm.generate(prompt, params)[0].outputs[0].token_ids
    for name, targets, message in (
        ("embedding", ("embed_tokens",), "embed_tokens.lora_embedding_A' is not a LoRA tensor"),
        ("other", ("w1",), "w1.lora_A.weight' is not a LoRA tensor"),
    ):
        model = base if name == "embedding" else torch.nn.ModuleDict({"w1": torch.nn.Linear(4, 4)})
        folder = save_adapter(tmp_path / name, model, 4, targets=targets)
        with pytest.raises(AdapterError, match=message):
            llm.generate(prompt, params, lora_request=LoRARequest(name, 2, str(folder)))
    llm.close()
