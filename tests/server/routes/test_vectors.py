"""Endpoints that return vectors and scores, on real tiny models, against transformers."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import BadRequestError
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.client.engine_client import EngineClient
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.text.tokenizer import Tokenizer
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec
from tests.server.api import Api, open_app
from tests.server.forked import FORKED
from tests.texts import byte_level_tokenizer, pair_tokenizer
from tests.tiny_encoders import save_tiny_encoder
from tests.tiny_models import VOCAB, save_tiny_model

BOS, END = 256, 258
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


@asynccontextmanager
async def serving(path: Path, tokenizer: Tokenizer, **options: Any) -> AsyncIterator[Api]:
    """The app with an engine in this process."""
    config = ServerConfig(model=str(path), **{"served_model_name": ["tiny"], "num_kv_blocks": 200, **options})
    client = EngineClient(InProcessClient(config))
    pooling, _ = read_pooling_and_tasks(path, read_model_config(path), config)
    app = create_app(client, ServedModelSpec(config, tokenizer, VOCAB, {}, pooling=pooling), launch_process=FORKED)
    async with open_app(app, client.engine_core) as api:
        yield api


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture(scope="module")
async def encoder(model: Path) -> AsyncIterator[Api]:
    async with serving(model, pair_tokenizer().tokenizer) as api:
        yield api


def with_special_tokens(text: str) -> list[int]:
    return [BOS, *text.encode(), END]


def transformers_embeddings(path: Path, prompts: Sequence[list[int]]) -> np.ndarray:
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        vectors = [model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() for ids in prompts]
    return np.stack([each / np.linalg.norm(each) for each in vectors])


TEXTS = ["a cat", "the weather in Bern is fine today", "x"]


async def test_embeddings_of_every_input_form_equal_transformers(encoder: Api, model: Path) -> None:
    ids = [with_special_tokens(text) for text in TEXTS]
    expected = transformers_embeddings(model, ids)
    for texts_or_ids in (TEXTS, ids):
        answer = await encoder.post(EMBEDDINGS, {"model": "tiny", "input": texts_or_ids})
        assert answer["object"] == "list"
        assert answer["model"] == "tiny"
        assert [(each["index"], each["object"]) for each in answer["data"]] == [(i, "embedding") for i in range(3)]
        assert np.array([each["embedding"] for each in answer["data"]]) == pytest.approx(expected, abs=1e-4)
        tokens = sum(map(len, ids))
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for alone in (TEXTS[1], ids[1], [TEXTS[1]], [ids[1]]):
        answer = await encoder.post(EMBEDDINGS, {"input": alone})
        assert [each["embedding"] for each in answer["data"]] == [pytest.approx(expected[1], abs=1e-4)]
    bare = await encoder.post(EMBEDDINGS, {"input": TEXTS[1], "add_special_tokens": False})
    assert bare["data"][0]["embedding"] == pytest.approx(
        transformers_embeddings(model, [list(TEXTS[1].encode())])[0], abs=1e-4
    )


async def test_openai_client_reads_base64_embeddings_by_default(encoder: Api, model: Path) -> None:
    expected = transformers_embeddings(model, [with_special_tokens(text) for text in TEXTS])
    response = await encoder.openai.embeddings.create(model="tiny", input=TEXTS)
    assert np.array([each.embedding for each in response.data]) == pytest.approx(expected, abs=1e-4)
    floats = await encoder.openai.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [each.embedding for each in floats.data] == [each.embedding for each in response.data]
    raw = await encoder.post(EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64"})
    read = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in raw["data"]]
    assert read == [each.embedding for each in floats.data]
    short = await encoder.openai.embeddings.create(model="tiny", input=TEXTS, dimensions=8)
    cut = expected[:, :8] / np.linalg.norm(expected[:, :8], axis=1, keepdims=True)
    assert np.array([each.embedding for each in short.data]) == pytest.approx(cut, abs=1e-4)
    with pytest.raises(BadRequestError) as refused:
        await encoder.openai.embeddings.create(model="tiny", input=TEXTS, dimensions=65)
    assert refused.value.param == "dimensions"


async def test_long_inputs_are_rejected_or_truncated(encoder: Api, model: Path) -> None:
    text = "many words " * 40
    error = (await encoder.post(EMBEDDINGS, {"input": ["short", text]}, 400))["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    expected = transformers_embeddings(
        model, [with_special_tokens(text[:318]), with_special_tokens(text[:5]), with_special_tokens(text[-5:])]
    )
    for fields, row in (
        ({"truncate_prompt_tokens": -1}, 0),
        ({"truncate_prompt_tokens": 320}, 0),
        ({"truncate_prompt_tokens": 7}, 1),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, 2),
    ):
        answer = await encoder.post(EMBEDDINGS, {"input": text, **fields})
        assert answer["data"][0]["embedding"] == pytest.approx(expected[row], abs=1e-4)
    ids = await encoder.post(
        EMBEDDINGS, {"input": with_special_tokens(text[:5]) + [5] * 400, "truncate_prompt_tokens": 7}
    )
    assert ids["data"][0]["embedding"] == pytest.approx(expected[1], abs=1e-4)


async def test_mixed_texts_and_token_ids_embed_as_alone(encoder: Api) -> None:
    async def vectors(given: Any) -> list[list[float]]:
        response = await encoder.post(EMBEDDINGS, {"input": given, "encoding_format": "float"})
        return [each["embedding"] for each in response["data"]]

    mixed = await vectors(["some text", [5, 6], "more"])
    assert mixed == [*await vectors("some text"), *await vectors([5, 6]), *await vectors("more")]


async def test_cohere_embed_equals_openai_embeddings(encoder: Api) -> None:
    texts = ["some text", "more of it"]
    openai_response = await encoder.post(EMBEDDINGS, {"input": texts, "encoding_format": "float"})
    vectors = np.array([each["embedding"] for each in openai_response["data"]], np.float32)
    kinds = ["float", "base64", "binary", "ubinary"]
    response = await encoder.post("/v2/embed", {"texts": texts, "input_type": "search_query", "embedding_types": kinds})
    embeddings = response["embeddings"]
    assert (response["texts"], list(embeddings)) == (texts, kinds)
    assert np.array_equal(np.array(embeddings["float"], np.float32), vectors)
    assert [base64.b64decode(each) for each in embeddings["base64"]] == [each.tobytes() for each in vectors]
    bits = np.unpackbits(np.array(embeddings["ubinary"], np.uint8), axis=1)[:, : vectors.shape[1]]
    assert np.array_equal(bits, vectors > 0)
    assert np.array_equal(np.array(embeddings["binary"]) + 128, np.array(embeddings["ubinary"]))
    assert response["meta"]["billed_units"]["input_tokens"] == openai_response["usage"]["prompt_tokens"]
    cut = await encoder.post("/v2/embed", {"texts": ["a " * 5000], "max_tokens": 9})
    assert cut["meta"]["billed_units"]["input_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"texts": ["a " * 5000], "truncate": "NONE"}, "texts"),
        ({"texts": ["a"], "output_dimension": 10_000}, "output_dimension"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
    ],
)
async def test_cohere_embed_errors_name_cohere_fields(encoder: Api, body: dict[str, Any], param: str) -> None:
    answer = await encoder.http.post("/v2/embed", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [[1], 2]}, "input"),
        ({"input": [[5], "a"], "prompt_name": "query"}, "prompt_name"),
        ({"input": [1, -1]}, "input"),
        ({"input": [VOCAB]}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "many"}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ({"input": "a", "timeout": -1}, "timeout"),
    ],
)
async def test_invalid_embedding_request_is_rejected_with_param(encoder: Api, body: dict[str, Any], param: str) -> None:
    response = await encoder.http.post(EMBEDDINGS, content=json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, {"input": TEXTS, "dimensions": 5, "request_id": "a"}),
        (RERANK, {"query": "cat", "documents": TEXTS, "request_id": "a"}),
        (SCORE, {"text_1": "cat", "text_2": TEXTS, "request_id": "a"}),
        (SCORE, {"queries": "cat", "documents": TEXTS, "request_id": "a"}),
        (EMBEDDINGS, {"input": TEXTS, "dimensions": 0}),
        (RERANK, {"query": "cat", "documents": []}),
    ],
)
async def test_invocation_equals_endpoint_for_vector_body(encoder: Api, path: str, body: dict[str, Any]) -> None:
    expected, actual = [await encoder.http.post(each, json=body) for each in (path, "/invocations")]
    assert actual.status_code == expected.status_code
    assert actual.json() | {"created": 0} == expected.json() | {"created": 0}


async def test_unsupported_tasks_of_embedding_model_are_rejected(encoder: Api) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi"})):
        error = (await encoder.post(path, body, 400))["error"]
        assert error["message"] == "The model `tiny` makes embeddings, not text"
    error = (await encoder.post("/classify", {"input": "hi"}, 400))["error"]
    assert error["message"] == "The model `tiny` makes embeddings, not scores"
    assert (await encoder.post(EMBEDDINGS, {"input": "a", "model": "other"}, 404))["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"image": "data:image/png;base64,aGk="}]}, "input"),
        ({"input": ["a", {"type": "image_url", "image_url": {"url": "http://a"}}]}, "input"),
        ({"input": {"content": [{"type": "text", "text": "a"}]}}, "input"),
    ],
)
async def test_images_in_embedding_input_are_rejected_with_hint(encoder: Api, body: dict[str, Any], param: str) -> None:
    error = (await encoder.post(EMBEDDINGS, body, 400))["error"]
    assert error["param"] == param
    assert error["message"].endswith("for a model that accepts images, send them in `messages` of /v1/embeddings")


async def test_embedding_response_lists_ignored_fields_and_chosen_id(encoder: Api) -> None:
    response = await encoder.http.post(
        EMBEDDINGS, json={"input": "a", "user": "me", "flavour": 1}, headers={"X-Request-Id": "mine"}
    )
    assert response.headers["X-Ignored-Params"] == "flavour"
    assert response.json()["id"] == "embd-mine"
    assert (await encoder.post(EMBEDDINGS, {"input": "a", "request_id": "yours"}))["id"] == "embd-yours"


async def test_many_inputs_are_counted_separately_and_equal_alone(encoder: Api) -> None:
    counted = 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} '

    async def count() -> float:
        lines = (await encoder.http.get("/metrics")).text.splitlines()
        return sum(float(line.removeprefix(counted)) for line in lines if line.startswith(counted))

    before, texts = await count(), [f"text {index}" for index in range(300)]
    answer = await encoder.post(EMBEDDINGS, {"input": texts})
    alone = await encoder.post(EMBEDDINGS, {"input": texts[211]})
    assert answer["data"][211]["embedding"] == alone["data"][0]["embedding"], "the same bits, whatever shares the steps"
    assert await count() == before + 301
    metrics = (await encoder.http.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
    models = (await encoder.http.get("/v1/models")).json()["data"]
    assert models[0]["max_model_len"] == 320


async def test_sentence_transformers_prompts_are_applied(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    (path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": null}'
    )
    async with serving(path, pair_tokenizer().tokenizer) as api:
        named = await api.post(EMBEDDINGS, {"input": ["cat", "dog"], "prompt_name": "query"})
        expected = transformers_embeddings(path, [with_special_tokens("Q: cat"), with_special_tokens("Q: dog")])
        assert [each["embedding"] for each in named["data"]] == [pytest.approx(each, abs=1e-4) for each in expected]
        error = (await api.post(EMBEDDINGS, {"input": "cat", "prompt_name": "answer"}, 400))["error"]
        assert "(query, document)" in error["message"]
        ranked = await api.post(RERANK, {"query": "cat", "documents": ["cat", "dog"]})
        query, *documents = transformers_embeddings(
            path, [with_special_tokens("Q: cat"), with_special_tokens("D: cat"), with_special_tokens("D: dog")]
        )
        for each in ranked["results"]:
            assert each["relevance_score"] == pytest.approx(float(query @ documents[each["index"]]), abs=1e-4)
    (path / "config_sentence_transformers.json").write_text('{"prompts": {"q": "Q: "}, "default_prompt_name": "q"}')
    async with serving(path, pair_tokenizer().tokenizer) as api:
        response = await api.post(EMBEDDINGS, {"input": "cat"})
        assert response["data"][0]["embedding"] == pytest.approx(expected[0], abs=1e-4)


async def test_embedding_model_scores_are_cosines(encoder: Api, model: Path) -> None:
    vectors = transformers_embeddings(model, [with_special_tokens(text) for text in TEXTS])
    one_to_many = await encoder.post(SCORE, {"text_1": TEXTS[0], "text_2": TEXTS})
    assert [each["score"] for each in one_to_many["data"]] == pytest.approx(list(vectors @ vectors[0]), abs=1e-4)
    assert [(each["index"], each["object"]) for each in one_to_many["data"]] == [(i, "score") for i in range(3)]
    assert one_to_many["usage"]["prompt_tokens"] == sum(len(with_special_tokens(text)) for text in TEXTS), (
        "each text once"
    )
    pairs = await encoder.post("/score", {"queries": TEXTS, "documents": TEXTS[::-1]})
    expected = [float(vectors[i] @ vectors[2 - i]) for i in range(3)]
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-4)
    for body, param in (
        ({"text_1": TEXTS[:2], "text_2": TEXTS}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"queries": "a"}, "text_2"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ({"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
    ):
        assert (await encoder.post(SCORE, body, 400))["error"]["param"] == param


@asynccontextmanager
async def open_cross_encoder(path: Path, family: str = "bert", labels: int = 1) -> AsyncIterator[tuple[Api, Any]]:
    """Yield the app, and a function that returns transformers' logits of a pair."""
    save_tiny_encoder(path, family, labels=labels)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()

    def pair_logits(first: str, second: str) -> np.ndarray:
        ids = [*with_special_tokens(first), *second.encode(), END]
        kinds = torch.tensor([[int(at >= len(first.encode()) + 2) for at in range(len(ids))]])
        with torch.inference_mode():
            return model(torch.tensor([ids]), token_type_ids=kinds).logits[0].numpy()

    async with serving(path, pair_tokenizer().tokenizer) as api:
        yield api, pair_logits


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


async def test_cross_encoder_scores_and_reranks_like_transformers(tmp_path: Path) -> None:
    async with open_cross_encoder(tmp_path) as (api, pair_logits):
        documents = ["a dog", "the weather", "cats are animals", "x"]
        expected = [sigmoid(pair_logits("a cat", each)[0]) for each in documents]
        scores = await api.post(SCORE, {"text_1": "a cat", "text_2": documents})
        assert [each["score"] for each in scores["data"]] == pytest.approx(expected, abs=1e-4)
        raw = await api.post(SCORE, {"text_1": "a cat", "text_2": documents, "use_activation": False})
        logits = [float(pair_logits("a cat", each)[0]) for each in documents]
        assert [each["score"] for each in raw["data"]] == pytest.approx(logits, abs=1e-4)
        best = sorted(range(4), key=lambda index: -expected[index])
        mixed_documents = [documents[0], {"text": documents[1]}, *documents[2:]]
        jina = await api.post(RERANK, {"query": "a cat", "documents": mixed_documents, "top_n": 3})
        assert [each["index"] for each in jina["results"]] == best[:3]
        assert [each["document"]["text"] for each in jina["results"]] == [documents[index] for index in best[:3]]
        assert [each["relevance_score"] for each in jina["results"]] == pytest.approx(
            [expected[i] for i in best[:3]], abs=1e-4
        )
        assert (await api.post("/rerank", {"query": "a cat", "documents": mixed_documents}))["results"][:3] == jina[
            "results"
        ]
        cohere = await api.post("/v2/rerank", {"model": "tiny", "query": "a cat", "documents": documents})
        assert [set(each) for each in cohere["results"]] == [{"index", "relevance_score"}] * 4
        assert cohere["meta"]["api_version"]["version"] == "2"
        shown = await api.post("/v2/rerank", {"query": "a cat", "documents": documents, "return_documents": True})
        assert "document" in shown["results"][0]
        error = (await api.post(EMBEDDINGS, {"input": "a"}, 400))["error"]
        assert error["message"] == "The model `tiny` makes scores, not embeddings"


@pytest.mark.slow
async def test_rerank_truncates_and_score_rejects_long_documents(tmp_path: Path) -> None:
    async with open_cross_encoder(tmp_path) as (api, pair_logits):
        long = "many words " * 60
        ranked = await api.post(RERANK, {"query": "a cat", "documents": [long], "return_documents": False})
        expected = sigmoid(pair_logits("a cat", long[: 320 - 3 - 5])[0])
        assert ranked["results"] == [{"index": 0, "relevance_score": pytest.approx(expected, abs=1e-4)}]
        many = await api.post(RERANK, {"query": "a cat" * 50, "documents": ["x", "y"] * 400})
        assert len({each["relevance_score"] for each in many["results"]}) == 2
        error = (await api.post(SCORE, {"text_1": "a cat", "text_2": long}, 400))["error"]
        assert error["code"] == "context_length_exceeded"
        few = await api.post("/v2/rerank", {"query": "a cat", "documents": [long], "max_tokens_per_doc": 6})
        expected = sigmoid(pair_logits("a cat", long[:6])[0])
        assert few["results"][0]["relevance_score"] == pytest.approx(expected, abs=1e-4)
        for body, param in (
            ({"query": "a"}, "documents"),
            ({"query": "a", "documents": []}, "documents"),
            ({"query": "a", "documents": [{"title": "x"}]}, "documents"),
            ({"documents": ["a"]}, "query"),
            ({"query": "a", "documents": ["a"] * 2049}, "documents"),
            ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
            ({"query": "a", "documents": ["a"], "truncation_side": "left"}, "truncation_side"),
        ):
            assert (await api.post(RERANK, body, 400))["error"]["param"] == param


async def test_classify_returns_label_and_probabilities(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "roberta", id2label={0: "bad", 1: "so-so", 2: "good"}, labels=3)
    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    async with serving(path, pair_tokenizer(segments=False).tokenizer) as api:
        answer = await api.post("/classify", {"model": "tiny", "input": TEXTS})
        pooled = await api.post("/pooling", {"input": TEXTS})
        refused = (await api.post(SCORE, {"text_1": "a", "text_2": "b"}, 400))["error"]
    for text, classified, vector in zip(TEXTS, answer["data"], pooled["data"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([with_special_tokens(text)])).logits[0].softmax(-1).numpy()
        assert classified["probs"] == pytest.approx(expected, abs=1e-4)
        assert classified["label"] == ("bad", "so-so", "good")[int(expected.argmax())]
        assert classified["num_classes"] == 3
        assert vector["object"] == "pooling"
        assert vector["data"] == classified["probs"]
    assert "3 labels" in refused["message"]


@pytest.mark.parametrize("family", ["bert", "qwen3"])
async def test_pooling_type_none_returns_vector_per_token(tmp_path: Path, family: str) -> None:
    """The vectors equal transformers', however a decoder's prompt is chunked, and whatever shares its steps."""
    encoder = family == "bert"
    path = save_tiny_encoder(tmp_path, "bert") if encoder else save_tiny_model(tmp_path, family)
    tokenizer = (pair_tokenizer() if encoder else byte_level_tokenizer()).tokenizer
    options = {"pooling_type": "none", "max_num_batched_tokens": 16}
    async with serving(path, tokenizer, **options) as api:
        ids = [tokenizer.encode(text) for text in TEXTS]
        response = await api.post(EMBEDDINGS, {"input": TEXTS, "encoding_format": "float"})
        plain = (await api.post("/pooling", {"input": TEXTS[1], "normalize": False}))["data"][0]["data"]
        short = (await api.post(EMBEDDINGS, {"input": TEXTS[1], "dimensions": 5}))["data"][0]["embedding"]
        coded = (await api.post(EMBEDDINGS, {"input": TEXTS[1], "encoding_format": "base64"}))["data"][0]["embedding"]
        one = response["data"][1]["embedding"]
        assert base64.b64decode(coded) == np.array(one, np.float32).tobytes(), "the same bits alone and beside others"
        if not encoder:  # a decoder also generates, and never from the prefix cache of vectors
            assert (await api.post("/v1/completions", {"prompt": TEXTS[1], "max_tokens": 2}))["choices"]
        for route, body in (
            (SCORE, {"text_1": "a", "text_2": "b"}),
            ("/v2/embed", {"texts": ["a"]}),
            ("/api/embed", {"input": "a"}),
        ):
            refused = await api.http.post(route, json=body)
            assert (refused.status_code, "--pooling-type none" in refused.text) == (400, True), route
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    for each, prompt_ids in zip(response["data"], ids, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt_ids])).last_hidden_state[0].numpy()
        unit = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
        assert np.array(each["embedding"]) == pytest.approx(unit, abs=2e-4)
        if each["index"] == 1:
            assert np.array(plain) == pytest.approx(hidden, abs=2e-3)
            cut = hidden[:, :5] / np.linalg.norm(hidden[:, :5], axis=1, keepdims=True)
            assert np.array(short) == pytest.approx(cut, abs=2e-4)


async def test_decoder_generates_and_embeds_in_one_server(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    async with serving(path, byte_level_tokenizer().tokenizer, pooling_type="last") as api:
        completion = await api.post("/v1/completions", {"prompt": "a cat", "max_tokens": 4, "temperature": 0})
        pooled = await api.post("/pooling", {"input": "a cat", "normalize": False})
        assert (await api.post("/pooling", {"input": "a cat", "task": "classify"}, 400))["error"]["param"] == "model"
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([list(b"a cat")])
    with torch.inference_mode():
        last = model.model(ids).last_hidden_state[0, -1]
        generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=-1)[0, 5:].tolist()
    assert pooled["data"][0]["data"] == pytest.approx(last.numpy(), abs=2e-4)
    assert completion["choices"][0]["text"] == byte_level_tokenizer().tokenizer.decode(generated)


async def test_classifier_from_token_scores_like_qwen3_reranker(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3", max_position_embeddings=1024)
    tokenizer = byte_level_tokenizer().tokenizer
    tokenizer.backend.save(str(path / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(path)

    def yes_probability(instruction: str, query: str, document: str) -> float:
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
        return torch.stack([logits[ord("n")], logits[ord("y")]]).softmax(0)[1].item()

    options = {"classifier_from_token": ["n", "y"], "max_model_len": 1000}
    async with serving(path, tokenizer, **options) as api:
        ranked = await api.post(RERANK, {"query": "a cat", "documents": ["dog", "bird"], "instruction": "Find animals"})
        scored = await api.post(SCORE, {"text_1": "a cat", "text_2": "dog"})
    expected = [yes_probability("Find animals", "a cat", each) for each in ("dog", "bird")]
    score_by_index = {each["index"]: each["relevance_score"] for each in ranked["results"]}
    assert [score_by_index[0], score_by_index[1]] == pytest.approx(expected, abs=1e-4)
    plain = yes_probability(
        "Given a web search query, retrieve relevant passages that answer the query", "a cat", "dog"
    )
    assert scored["data"][0]["score"] == pytest.approx(plain, abs=1e-4)


async def test_text_model_rejects_scores_with_reranker_hint(tmp_path: Path) -> None:
    async with serving(save_tiny_model(tmp_path, "llama"), pair_tokenizer().tokenizer) as api:
        rerank_body = {"query": "a cat", "documents": ["a dog"]}
        pair = {"text_1": "a cat", "text_2": "a dog"}
        for route, body in ((RERANK, rerank_body), ("/v2/rerank", {**rerank_body, "model": "tiny"}), (SCORE, pair)):
            refused = await api.http.post(route, json=body)
            response = refused.json()
            message = response.get("message") or response["error"]["message"]
            assert refused.status_code == 400, route
            assert "The model `tiny` generates text and cannot score pairs of texts: serve a reranker" in message
