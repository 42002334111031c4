"""Embeddings of decoders equal transformers' pooled hidden states, for each pooling type and in any batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.engine.vectors import NORMALIZE, pooling_module, same, vectors, write_modules
from tests.tiny_models import VOCAB, save_tiny_model

LENGTHS = (1, 2, 7, 16, 33, 50, 64, 90)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    common = torch.randint(3, VOCAB, (40,), generator=generator).tolist()
    distinct = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return distinct + [common + each for each in distinct[:3]]


def pooled_hidden_states(path: Path, prompts: list[list[int]], mode: str) -> list[np.ndarray]:
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
    return [{"last": each[-1], "mean": each.mean(0), "cls": each[0]}[mode] for each in states]


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def start(path: Path, **options: object) -> EngineCore:
    pooling_type = "auto" if (path / "modules.json").exists() else "last"
    return EngineCore(EngineConfig(model=str(path), **{"num_kv_blocks": 300, "pooling_type": pooling_type, **options}))


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["last", "mean", "cls"])
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "gemma3", "lfm2", "qwen3_5"])
def test_decoder_embeddings_equal_transformers(family: str, mode: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    write_modules(path, pooling_module(64, mode), NORMALIZE)
    expected = [normalized(each) for each in pooled_hidden_states(path, prompts(), mode)]
    for backend in ("cpu", "reference"):
        engine = start(path, attention_backend=backend)
        assert engine.info.tasks == ("generate", "embed")
        actual = vectors(engine, prompts())
        for i, vector in enumerate(actual):
            assert vector == pytest.approx(expected[i], abs=1e-4), f"{backend}, prompt {i}"


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["last", "mean", "cls"])
def test_decoder_embedding_does_not_depend_on_batch(mode: str, dtype: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    options = {"pooling_type": mode, "dtype": dtype}
    engine = start(path, **options)
    alone = [vectors(engine, [prompt])[0] for prompt in prompts()]
    together = start(path, **options)
    assert same(vectors(together, prompts()), alone), "all in one step"
    assert same(vectors(together, prompts()), alone), "with a warm prefix cache"
    assert (together.engine_stats.prefix_hits > 0) == (mode == "last")
    others = [request(f"t{i}", prompt, max_tokens=30, temperature=1.0) for i, prompt in enumerate(prompts())]
    assert same(vectors(together, prompts(), others=others), alone), "beside answers"
    assert same(vectors(start(path, **options, max_num_batched_tokens=7), prompts()), alone), "in chunks of 7 tokens"
    small_engine = start(path, **options, num_kv_blocks=14, max_model_len=200, max_num_batched_tokens=64)
    assert same(vectors(small_engine, prompts(), others=others), alone), "preempted"
    assert small_engine.engine_stats.preemptions > 0


def test_pooling_requests_do_not_change_generated_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    generation_requests = [
        request(f"t{i}", prompt, max_tokens=20, prompt_logprobs=1) for i, prompt in enumerate(prompts())
    ]
    alone = run(start(path), generation_requests)
    engine = start(path, max_num_batched_tokens=50)
    for each in generation_requests:
        engine.add_request(each)
    tokens: dict[str, list[int]] = {each.id: [] for each in generation_requests}
    for index, prompt in enumerate(prompts()):
        engine.add_request(EngineCoreRequest(id=f"v{index}", prompt_ids=prompt, params=PoolingParams(), seed=0))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            if output.id in tokens:
                tokens[output.id] += output.new_ids
                if output.prompt_logprobs is not None:
                    assert output.prompt_logprobs == alone[output.id].prompt_logprobs
    assert tokens == {name: answer.ids for name, answer in alone.items()}


def test_embedding_dimensions_are_truncated_before_normalization(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    engine, prompt = start(path), prompts()[4]
    (raw,) = pooled_hidden_states(path, [prompt], "last")
    params = [
        PoolingParams(dimensions=10),
        PoolingParams(dimensions=10, activation=False),
        PoolingParams(activation=False),
    ]
    cut, cut_raw, whole_raw = vectors(engine, [prompt] * 3, params)
    assert cut == pytest.approx(normalized(raw[:10]), abs=1e-4)
    assert cut_raw == pytest.approx(raw[:10], abs=2e-4)
    assert whole_raw == pytest.approx(raw, abs=2e-4)


def test_dense_module_is_applied_after_pooling(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    dense = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    write_modules(path, pooling_module(64, "mean"), ("2_Dense", "Dense", dense))
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(24, 64, generator=generator) / 8, torch.randn(24, generator=generator)
    save_file({"linear.weight": weight, "linear.bias": bias}, path / "2_Dense" / "model.safetensors")
    states = pooled_hidden_states(path, prompts(), "mean")
    for state, vector in zip(states, vectors(start(path), prompts()), strict=True):
        expected = np.tanh(weight.numpy() @ state + bias.numpy())
        assert vector == pytest.approx(expected, abs=1e-4), "not scaled: there is no Normalize module"


def test_checkpoint_without_lm_head_serves_embed_only(tmp_path: Path) -> None:
    """Qwen3-Embedding and E5-Mistral are saved like this: tensor names lack `model.`."""
    whole = save_tiny_model(tmp_path / "whole", "mistral-window")
    AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "body")
    engine = start(tmp_path / "body")
    assert engine.info.tasks == ("embed",)
    assert same(vectors(engine, prompts()), vectors(start(whole), prompts()))
    assert same(vectors(start(whole, runner="pooling"), prompts()), vectors(engine, prompts()))
    engine.add_request(request("a", [5, 6]))
    assert [output.error for output in engine.step()] == ["the model serves embed, not generate"]
    with pytest.raises(ConfigError, match="runner"):
        start(tmp_path / "body", runner="generate")


@pytest.mark.parametrize("options", [{"runner": "generate"}, {"pooling_type": "auto"}])
def test_generation_model_rejects_embedding_request(options: dict[str, str], tmp_path: Path) -> None:
    engine = start(save_tiny_model(tmp_path, "llama"), **options)
    engine.add_request(EngineCoreRequest(id="v", prompt_ids=[5, 6], params=PoolingParams(), seed=0))
    assert [output.error for output in engine.step()] == ["the model serves generate, not embed"]


@pytest.mark.parametrize("labels", [1, 3])
def test_sequence_classification_equals_transformers(labels: int, tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "qwen3")
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, pad_token_id=0)
    torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(tmp_path / "made")
    engine = start(tmp_path / "made")
    assert engine.info.tasks == ("classify",)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts()])
    expected = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    actual = vectors(engine, prompts(), PoolingParams(task="classify"))
    assert np.stack(actual) == pytest.approx(expected.numpy(), abs=1e-4)
    raw = vectors(engine, prompts(), PoolingParams(task="classify", activation=False))
    assert np.stack(raw) == pytest.approx(logits.numpy(), abs=1e-4)


def test_unsupported_sentence_transformers_modules_are_named_in_error(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    write_modules(path, pooling_module(64, "mean"), ("2_LayerNorm", "LayerNorm", {}))
    with pytest.raises(ConfigError, match=r"modules\.json: LayerNorm is not supported"):
        start(path)
    write_modules(path, ("1_Pooling", "Pooling", {"pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match=r"1_Pooling/config\.json: pooling by max_tokens is not supported"):
        start(path)
    dense = {"in_features": 32, "out_features": 24, "bias": True, "activation_function": "torch.nn.Tanh"}
    write_modules(path, pooling_module(64, "mean"), ("2_Dense", "Dense", dense))
    with pytest.raises(ConfigError, match="in_features"):
        start(path)
    (path / "modules.json").write_text(json.dumps([{"path": "../elsewhere", "type": "x.Pooling"}]))
    with pytest.raises(ConfigError, match="is not in the model's folder"):
        start(path)
