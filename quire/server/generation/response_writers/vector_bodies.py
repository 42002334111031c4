"""Writers of vector answers. Binding the arguments before `request` turns a function into a VectorBodyWriter."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from quire.engine.common import clock
from quire.server.encoding import encode_json
from quire.server.generation.vector_generation import VectorRequest

VectorList = Sequence[np.ndarray]
ScorePairs = Sequence[tuple[int, int]] | None
"""Pairs of inputs. The cosine similarity of a pair is its score. If None, each input is a pair of texts, and its vector
is the score.
"""


def _list_body(request: VectorRequest, weights_version: str, data: list[dict[str, Any]]) -> bytes:
    about = {"id": request.answer_id, "object": "list", "created": int(clock.time()), "model": request.model}
    return encode_json({**about, "weights_version": weights_version, "data": data, "usage": _usage_fields(request)})


def _usage_fields(request: VectorRequest) -> dict[str, int]:
    return {"prompt_tokens": request.prompt_tokens, "total_tokens": request.prompt_tokens}


def embeddings_body(
    encoding: Literal["float", "base64"],
    kind: Literal["embedding", "pooling"],
    vector_size: int | None,
    request: VectorRequest,
    weights_version: str,
    vectors: VectorList,
) -> bytes:
    """`vector_size`: numbers per vector if each token has a vector, else None."""
    key = "embedding" if kind == "embedding" else "data"
    encoded_vectors = [
        _encode_base64(each) if encoding == "base64" else _to_numbers(each, vector_size) for each in vectors
    ]
    data = [{"object": kind, "index": index, key: each} for index, each in enumerate(encoded_vectors)]
    return _list_body(request, weights_version, data)


def _encode_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _to_numbers(vector: np.ndarray, size: int | None) -> list[Any]:
    numbers: list[Any] = (vector if size is None else vector.reshape(-1, size)).tolist()
    return numbers


def cohere_embed_body(
    types: Sequence[str], texts: Sequence[str], request: VectorRequest, weights_version: str, vectors: VectorList
) -> bytes:
    embeddings_by_type = {kind: [_to_embedding_type(each, kind) for each in vectors] for kind in types}
    about = {"id": request.answer_id, "model": request.model, "response_type": "embeddings_by_type", "texts": texts}
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": request.prompt_tokens}}
    return encode_json({**about, "weights_version": weights_version, "embeddings": embeddings_by_type, "meta": meta})


def _to_embedding_type(vector: np.ndarray, kind: str) -> object:
    """`vector`: float32."""
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return _encode_base64(vector)
    bits = np.packbits(vector > 0)
    return (bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)).tolist()


def classification_body(
    names: Sequence[str], request: VectorRequest, weights_version: str, vectors: VectorList
) -> bytes:
    data = [
        {
            "index": index,
            "label": names[int(probabilities.argmax())],
            "probs": probabilities.tolist(),
            "num_classes": len(probabilities),
        }
        for index, probabilities in enumerate(vectors)
    ]
    return _list_body(request, weights_version, data)


def pair_scores(pairs: ScorePairs, vectors: VectorList) -> list[float]:
    if pairs is None:
        return [float(vector[0]) for vector in vectors]
    return [cosine_similarity(vectors[first], vectors[second]) for first, second in pairs]


def scores_body(pairs: ScorePairs, request: VectorRequest, weights_version: str, vectors: VectorList) -> bytes:
    numbered_scores = enumerate(pair_scores(pairs, vectors))
    data = [{"index": index, "object": "score", "score": score} for index, score in numbered_scores]
    return _list_body(request, weights_version, data)


def rerank_body(
    pairs: ScorePairs,
    documents: Sequence[str] | None,
    top_n: int,
    request: VectorRequest,
    weights_version: str,
    vectors: VectorList,
    *,
    cohere: bool,
) -> bytes:
    """`top_n` 0 returns all."""
    relevance_scores = pair_scores(pairs, vectors)
    ranked_indices = sorted(range(len(relevance_scores)), key=lambda index: (-relevance_scores[index], index))
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": relevance_scores[index]} for index in ranked_indices[: top_n or None]
    ]
    if documents is not None:
        results = [{**each, "document": {"text": documents[each["index"]]}} for each in results]
    tokens = {"input_tokens": request.prompt_tokens}
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens}
    end = {"meta": meta} if cohere else {"usage": _usage_fields(request)}
    about = {"id": request.answer_id, "model": request.model, "results": results, "weights_version": weights_version}
    return encode_json(about | end)


def cosine_similarity(first: np.ndarray, second: np.ndarray) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    return max(-1.0, min(1.0, float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)))
