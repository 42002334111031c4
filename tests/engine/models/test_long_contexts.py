"""The served context, not a single request, chooses LongRoPE's factors. Also covers Mistral 3's text model in a vision
checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.tiny_models import LONGROPE, QUERY_SCALES, SHAPE, TOWER, VOCAB, save_tiny_model


def prompt(length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(5)).tolist()


def check(model: torch.nn.Module, path: Path, length: int, **options: int) -> None:
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=32, dtype="float32", **options))
    prompt_logprobs = run(engine, [request("a", prompt(length), max_tokens=1, prompt_logprobs=0)])["a"].prompt_logprobs
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([prompt(length)])).logits[0].log_softmax(-1)
    expected = [rows[at, token].item() for at, token in enumerate(prompt(length)[1:])]
    assert prompt_logprobs is not None
    assert [each.logprob for each in prompt_logprobs[1:] if each is not None] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("length", "options"), [(90, {}), (60, {"max_model_len": 64})])
def test_longrope_factors_are_chosen_by_max_model_len(length: int, options: dict[str, int], tmp_path: Path) -> None:
    """transformers takes the long factors for inputs beyond the original context, the short ones for others."""
    path = save_tiny_model(
        tmp_path, "phi3", rope_parameters=LONGROPE | {"original_max_position_embeddings": 64, "factor": None}
    )
    check(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), path, length, **options)


def test_mistral3_text_model_logprobs_equal_transformers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    text = SHAPE | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": QUERY_SCALES}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=TOWER | {"model_type": "pixtral"})
    config.tie_word_embeddings = False
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(tmp_path)
    check(model.eval(), tmp_path, 90)
