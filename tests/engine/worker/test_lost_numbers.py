"""Tests that a request whose logits become infinite or NaN ends with an error of its own and harms no other request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

BROKEN = 17
"""The token whose embedding is NaN."""


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "deepseek_v2-dense", "gpt_neox"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), request.param, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    name = next(each for each in tensors if each.endswith(("embed_tokens.weight", "embed_in.weight")))
    tensors[name][BROKEN] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.few(4)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}, {"logprobs": 2}],
    ids=["greedy", "sampled", "filtered", "logprobs"],
)
def test_request_with_non_finite_logits_fails_alone(params: dict[str, Any], backend: str, path: Path) -> None:
    """Other requests reuse its KV blocks, which hold NaN."""
    options: dict[str, Any] = {"num_kv_blocks": 8, "max_model_len": 64, "enable_prefix_caching": False}
    prompts = {"a": range(20, 50), "b": range(60, 75), "c": range(80, 99)}
    good = [request(name, ids, max_tokens=8, **params) for name, ids in prompts.items()]
    broken = request("lost", [*range(30, 50), BROKEN, 40], max_tokens=8, **params)
    expected = run(EngineCore(EngineConfig(model=str(path), attention_backend=backend, **options)), good)
    engine = EngineCore(EngineConfig(model=str(path), attention_backend=backend, **options))
    for _ in range(2):
        tokens, errors = tokens_and_errors(engine, [good[0], broken, *good[1:]])
        assert errors.keys() == {"lost"}
        assert errors["lost"].startswith("the model computed no finite logit for the next token")
        assert tokens == {name: each.ids for name, each in expected.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_output_head_with_nan_is_refused(tied: bool, tmp_path: Path) -> None:
    """One logit of each row would be NaN, and sampling would choose any token."""
    path = save_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)
    tensors = load_file(path / "model.safetensors")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    tensors[name][BROKEN, 3] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} holds numbers that are infinite or NaN"):
        EngineCore(EngineConfig(model=str(path), num_kv_blocks=8))


def tokens_and_errors(
    engine: EngineCore, requests: list[EngineCoreRequest]
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The tokens of requests that succeed, and the errors of the others."""
    tokens, errors = {each.id: list[int]() for each in requests}, dict[str, str]()
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.new_ids
            if output.error is not None:
                errors[output.id] = output.error
    engine.scheduler.kv_cache_manager.block_pool.check_invariants()
    return {name: ids for name, ids in tokens.items() if name not in errors}, errors
