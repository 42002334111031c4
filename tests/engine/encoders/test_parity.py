"""Embeddings and classifier scores of every encoder family equal transformers', for a ragged batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.engine.vectors import NORMALIZE, pooling_module, same, vectors, write_modules
from tests.tiny_encoders import ENCODERS, save_tiny_encoder
from tests.tiny_models import VOCAB

BACKENDS = ("cpu", "reference")
LENGTHS = (1, 2, 7, 16, 33, 50, 64, 130, 300)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def start(path: Path, **options: object) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **options))


def hidden_states(path: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ENCODERS)
def test_encoder_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, family)
    states = hidden_states(path, prompts())
    for mode, expected in (("mean", [each.mean(0) for each in states]), ("cls", [each[0] for each in states])):
        write_modules(path, pooling_module(64, mode), NORMALIZE)
        for backend in BACKENDS:
            engine = start(path, attention_backend=backend)
            assert engine.info.tasks == ("embed",)
            actual = vectors(engine, prompts(), PoolingParams(activation=False))
            for i, vector in enumerate(actual):
                assert vector == pytest.approx(expected[i].numpy(), abs=1e-4), f"{backend}, {mode}, prompt {i}"
            scaled = vectors(engine, prompts())
            assert np.linalg.norm(np.stack(scaled), axis=1) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "nomic"])
def test_embedding_does_not_depend_on_batch(family: str, dtype: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, family)
    for backend in BACKENDS:
        engine = start(path, attention_backend=backend, dtype=dtype)
        alone = [vectors(engine, [prompt])[0] for prompt in prompts()]
        assert same(vectors(engine, prompts()), alone), "all in one step"
        assert same(vectors(engine, prompts() * 2), alone * 2), "several of each"
        few = start(path, attention_backend=backend, dtype=dtype, max_num_seqs=2, max_num_batched_tokens=64)
        assert same(vectors(few, prompts()), alone), "two at a time"
        assert engine.engine_stats.prefix_queries == engine.engine_stats.prefix_hits + sum(LENGTHS) * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "mpnet", "nomic", "roberta", "xlm-roberta"])
def test_classifier_scores_equal_transformers(family: str, labels: int, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, family, labels=labels)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts()])
    for backend in BACKENDS:
        engine = start(path, attention_backend=backend)
        assert engine.info.tasks == ("classify",)
        raw = np.stack(vectors(engine, prompts(), PoolingParams(task="classify", activation=False)))
        assert raw == pytest.approx(logits.numpy(), abs=1e-4)
        expected = logits.sigmoid() if labels == 1 else logits.softmax(-1)
        assert np.stack(vectors(engine, prompts(), PoolingParams(task="classify"))) == pytest.approx(expected, abs=1e-4)


def test_classifier_uses_token_types_of_second_segment(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert", labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    begins = [None if len(prompt) < 5 else len(prompt) // 3 for prompt in prompts()]
    expected = []
    for prompt, begin in zip(prompts(), begins, strict=True):
        kinds = [int(begin is not None and at >= begin) for at in range(len(prompt))]
        with torch.inference_mode():
            expected.append(model(torch.tensor([prompt]), token_type_ids=torch.tensor([kinds])).logits[0].numpy())
    params = [PoolingParams(task="classify", activation=False, second_segment=begin) for begin in begins]
    assert np.stack(vectors(start(path), prompts(), params)) == pytest.approx(np.stack(expected), abs=1e-4)


def test_encoder_engine_has_no_kv_cache_and_limits_prompt_length(tmp_path: Path) -> None:
    engine = start(save_tiny_encoder(tmp_path, "bert"), max_num_seqs=3)
    assert (engine.info.kv_bytes, engine.info.max_model_len) == (0, 320)
    assert engine.info.deterministic
    assert "no KV" in engine.info.arithmetic
    too_long = EngineCoreRequest(id="long", prompt_ids=[5] * 321, params=PoolingParams(), seed=0)
    engine.add_request(too_long)
    assert "320" in (engine.step()[0].error or "")


@pytest.mark.parametrize(("family", "longest"), [("roberta", 318), ("mpnet", 318), ("nomic", 320), ("bert", 320)])
def test_encoder_max_model_len_fits_position_table(family: str, longest: int, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, family)
    engine = start(path)
    assert engine.info.max_model_len == longest
    (vector,) = vectors(engine, [[5] * longest], PoolingParams(activation=False))
    assert vector == pytest.approx(hidden_states(path, [[5] * longest])[0].mean(0).numpy(), abs=1e-4)
    with pytest.raises(ConfigError, match=f"{longest + 1} exceeds the model's {longest} positions"):
        start(path, max_model_len=longest + 1)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert start(path).info.max_model_len == 100
    assert start(path, max_model_len=200).info.max_model_len == 200


def test_settings_unsupported_for_encoders_are_rejected(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    with pytest.raises(ConfigError, match="runner"):
        start(path, runner="generate")
    with pytest.raises(ConfigError, match="hidden_act 'relu' is not supported in a 'modernbert'"):
        start(save_tiny_encoder(tmp_path / "gated", "modernbert", hidden_activation="relu"))
    with pytest.raises(ConfigError, match="deterministic"):
        start(path, deterministic=True, dtype="float16", attention_backend="reference")
    assert start(path, deterministic=True).info.deterministic
    with pytest.raises(ConfigError, match="speculative_config"):
        start(path, speculative_config="ngram")
    with pytest.raises(ConfigError, match="classifier_from_token"):
        start(path, classifier_from_token=["no", "yes"])
    with pytest.raises(ConfigError, match="executor_cls: encoders ") as refusal:
        start(path, executor_cls="quire.engine.worker.ranks.spmd:SpmdRanks")
    assert refusal.value.param == "executor_cls"
