"""Cohere's SDK: /v2/rerank and /v2/embed."""

from __future__ import annotations

from typing import Any

import cohere
import httpx
import pytest

MODEL = "quire-demo"
TEXTS = ["The fox sleeps.", "A crow sings in the rain.", "Bread is baked in Rome."]


def test_cohere_sdk_rerank_equals_score_endpoint(server: Any) -> None:
    client = cohere.ClientV2(api_key="none", base_url=server.url)
    ranked = client.rerank(model=MODEL, query=TEXTS[1], documents=TEXTS)
    assert ranked.results[0].index == 1, "the query itself fits best"
    assert ranked.results[0].relevance_score == pytest.approx(1.0, abs=1e-5)
    scored = httpx.post(f"{server.url}/v1/score", json={"text_1": TEXTS[1], "text_2": TEXTS}).json()["data"]
    for result in ranked.results:
        assert result.relevance_score == pytest.approx(scored[result.index]["score"], abs=1e-6)
    assert [each.relevance_score for each in ranked.results] == sorted((each["score"] for each in scored), reverse=True)
    assert ranked.meta is not None
    assert ranked.meta.api_version is not None
    assert ranked.meta.api_version.version == "2"
    best = client.rerank(model=MODEL, query=TEXTS[1], documents=TEXTS, top_n=2)
    assert best.results == ranked.results[:2]


def test_cohere_sdk_embed_returns_float_and_ubinary_vectors(server: Any) -> None:
    client = cohere.ClientV2(api_key="none", base_url=server.url)
    kinds = ["float", "ubinary"]
    embedded = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=kinds)
    expected = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS}).json()["data"]
    assert embedded.embeddings.float_ is not None
    assert embedded.embeddings.ubinary is not None
    assert embedded.texts == TEXTS
    for vector, bits, each in zip(embedded.embeddings.float_, embedded.embeddings.ubinary, expected, strict=True):
        assert vector == pytest.approx(each["embedding"], abs=1e-6)
        assert len(bits) == -(-len(vector) // 8)


def test_cohere_sdk_raises_typed_errors(server: Any) -> None:
    client = cohere.ClientV2(api_key="none", base_url=server.url)
    with pytest.raises(cohere.BadRequestError, match="documents"):
        client.rerank(model=MODEL, query="x", documents=[])
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        client.rerank(model="x", query="x", documents=["x"])
