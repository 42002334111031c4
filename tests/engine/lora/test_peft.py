"""Adapters that PEFT writes give PEFT's logprobs; skipped if PEFT is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapters import ALL
from tests.engine.harness import run
from tests.engine.lora.test_parity import asked, check, engine, prompts, spool
from tests.tiny_models import save_tiny_model

peft = pytest.importorskip("peft", reason="PEFT is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "target_modules": list(ALL)},
    "all-linear": {"r": 5, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": list(ALL),
        "rank_pattern": {"q_proj": 16, "layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"k_proj": 3},
        "exclude_modules": ["v_proj"],
    },
    "a layer": {"r": 64, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "embedding and head": {"r": 6, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_logprobs_equal_peft(family: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = save_tiny_model(tmp_path / "model", family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(lora_alpha=12, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind])
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = spool(tmp_path / "spool", path).add_adapter("x", str(tmp_path / "adapter"))
    requests = [asked(f"r{index}", ids, adapter) for index, ids in enumerate(prompts(4))]
    answers = run(engine(path), requests)
    for request in requests:
        check(adapted.eval().double(), request.prompt_ids, answers[request.id])
