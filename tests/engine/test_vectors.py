"""LLM.embed, .encode, .classify and .score against transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from quire import LLM, PoolingParams
from quire.engine.common.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from tests.texts import pair_tokenizer
from tests.tiny_encoders import save_tiny_encoder

BOS, END = 256, 258
TEXTS = ["a cat", "the weather in Bern is fine today", "x"]


def save(path: Path, family: str, tokenizer: Tokenizer, **options: int) -> Path:
    save_tiny_encoder(path, family, **options)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    return path


def token_ids(text: str) -> list[int]:
    return [BOS, *text.encode(), END]


def test_llm_embeddings_and_cosine_scores_equal_transformers(tmp_path: Path) -> None:
    path = save(tmp_path, "bert", pair_tokenizer().tokenizer)
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = [model(torch.tensor([token_ids(text)])).last_hidden_state[0].mean(0).numpy() for text in TEXTS]
    expected = [each / np.linalg.norm(each) for each in states]
    llm = LLM(str(path))
    outputs = llm.embed(TEXTS, use_tqdm=False)
    for text, each, vector in zip(TEXTS, outputs, expected, strict=True):
        assert each.prompt == text
        assert each.prompt_token_ids == token_ids(text)
        assert each.outputs.embedding == pytest.approx(vector, abs=1e-4)
    (alone,) = llm.embed(token_ids(TEXTS[1]), use_tqdm=False)
    assert alone.prompt is None
    assert alone.outputs.embedding == outputs[1].outputs.embedding
    (raw,) = llm.encode(TEXTS[0], PoolingParams(activation=False, dimensions=5), use_tqdm=False)
    assert raw.outputs.data == pytest.approx(states[0][:5], abs=1e-4)
    scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx([expected[0] @ each for each in expected], abs=1e-4)
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(InvalidRequest, match="has 482 tokens, the context is 320"):
        llm.embed("word " * 96, use_tqdm=False)
    (cut,) = llm.embed("word " * 96, truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.prompt_token_ids == token_ids(("word " * 96)[:318])
    for wrong in (
        lambda: llm.generate("a", use_tqdm=False),
        lambda: llm.classify("a", use_tqdm=False),
        lambda: llm.embed("a", pooling_params=PoolingParams(dimensions=65), use_tqdm=False),
        lambda: llm.score(["a", "b"], ["c", "d", "e"], use_tqdm=False),
    ):
        with pytest.raises(InvalidRequest):
            wrong()
    llm.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("labels", [1, 3])
def test_llm_classify_and_pair_scores_equal_transformers(labels: int, tmp_path: Path) -> None:
    path = save(tmp_path, "roberta", pair_tokenizer(segments=False).tokenizer, labels=labels)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    llm = LLM(str(path))
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([token_ids(text)])).logits for text in TEXTS])
        pairs = [model(torch.tensor([[*token_ids("a cat"), *text.encode(), END]])).logits[0] for text in TEXTS]
    expected = logits.sigmoid() if labels == 1 else logits.softmax(-1)
    outputs = llm.classify(TEXTS, use_tqdm=False)
    assert np.array([each.outputs.probs for each in outputs]) == pytest.approx(expected.numpy(), abs=1e-4)
    assert [each.outputs.probs for each in llm.encode(TEXTS, use_tqdm=False)] == [
        each.outputs.probs for each in outputs
    ]
    if labels == 1:
        scores = llm.score("a cat", TEXTS, use_tqdm=False)
        assert [each.outputs.score for each in scores] == pytest.approx([p.sigmoid().item() for p in pairs], abs=1e-4)
    else:
        with pytest.raises(InvalidRequest, match="3 labels"):
            llm.score("a cat", TEXTS, use_tqdm=False)
    llm.close()
