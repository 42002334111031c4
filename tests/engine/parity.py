"""Compares prompt log probabilities with transformers' in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.tiny_models import VOCAB


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def edit_json(file: Path, drop: Sequence[str] = (), **changes: Any) -> None:
    content = json.loads(file.read_text())
    content = {name: value for name, value in content.items() if name not in drop} | changes
    file.write_text(json.dumps(content))


def largest_difference(folder: Path, prompt: Sequence[int], served: Path | None = None, **settings: Any) -> float:
    """The largest difference between transformers' log probabilities of a prompt and those of the model at `served`, by
    default the same folder.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    settings = {"model": str(served or folder), "num_kv_blocks": 64, "dtype": "float32"} | settings
    engine = EngineCore(EngineConfig(**settings))
    logprobs = run(engine, [request("0", prompt, max_tokens=1, prompt_logprobs=0)])["0"].prompt_logprobs
    assert logprobs is not None
    wanted = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    return max(
        abs(logprob.logprob - value) for logprob, value in zip(logprobs[1:], wanted, strict=True) if logprob is not None
    )
