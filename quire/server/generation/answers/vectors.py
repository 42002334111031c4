"""Answers that are made of vectors: embeddings, scores, rankings and labels. Each function is a VectorAnswer once the
arguments before the spec are given."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from quire.engine import clock
from quire.server.encoding import encode_json
from quire.server.generation.vectors import VectorSpec

Vectors = Sequence[np.ndarray]
Pairs = Sequence[tuple[int, int]] | None
"""The two inputs of each score, their embeddings' cosine; None: each input is a pair, and its vector the score."""


def _whole(spec: VectorSpec, weights_version: str, data: list[dict[str, Any]]) -> bytes:
    about = {"id": spec.answer_id, "object": "list", "created": int(clock.time()), "model": spec.model}
    return encode_json({**about, "weights_version": weights_version, "data": data, "usage": _usage(spec)})


def _usage(spec: VectorSpec) -> dict[str, int]:
    return {"prompt_tokens": spec.prompt_tokens, "total_tokens": spec.prompt_tokens}


def embeddings(
    encoding: Literal["float", "base64"],
    kind: Literal["embedding", "pooling"],
    size: int | None,
    spec: VectorSpec,
    weights_version: str,
    vectors: Vectors,
) -> bytes:
    """/v1/embeddings, and /pooling with other names. `size`: numbers of a vector, where each token of an input has
    one."""
    key = "embedding" if kind == "embedding" else "data"
    shown = [_base64(each) if encoding == "base64" else _numbers(each, size) for each in vectors]
    data = [{"object": kind, "index": index, key: each} for index, each in enumerate(shown)]
    return _whole(spec, weights_version, data)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _numbers(vector: np.ndarray, size: int | None) -> list[Any]:
    found: list[Any] = (vector if size is None else vector.reshape(-1, size)).tolist()
    return found


def cohere_embeddings(
    types: Sequence[str], texts: Sequence[str], spec: VectorSpec, weights_version: str, vectors: Vectors
) -> bytes:
    """/v2/embed."""
    found = {kind: [_as_type(each, kind) for each in vectors] for kind in types}
    about = {"id": spec.answer_id, "model": spec.model, "response_type": "embeddings_by_type", "texts": texts}
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": spec.prompt_tokens}}
    return encode_json({**about, "weights_version": weights_version, "embeddings": found, "meta": meta})


def _as_type(vector: np.ndarray, kind: str) -> object:
    """A vector of float32 as Cohere's embedding_types have it."""
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return _base64(vector)
    bits = np.packbits(vector > 0)
    return (bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)).tolist()


def labels(names: Sequence[str], spec: VectorSpec, weights_version: str, vectors: Vectors) -> bytes:
    """/classify."""
    data = [
        {
            "index": index,
            "label": names[int(probabilities.argmax())],
            "probs": probabilities.tolist(),
            "num_classes": len(probabilities),
        }
        for index, probabilities in enumerate(vectors)
    ]
    return _whole(spec, weights_version, data)


def scores_of(pairs: Pairs, vectors: Vectors) -> list[float]:
    if pairs is None:
        return [float(vector[0]) for vector in vectors]
    return [cosine(vectors[first], vectors[second]) for first, second in pairs]


def scores(pairs: Pairs, spec: VectorSpec, weights_version: str, vectors: Vectors) -> bytes:
    """/v1/score."""
    found = enumerate(scores_of(pairs, vectors))
    data = [{"index": index, "object": "score", "score": score} for index, score in found]
    return _whole(spec, weights_version, data)


def ranking(
    pairs: Pairs,
    documents: Sequence[str] | None,
    top_n: int,
    spec: VectorSpec,
    weights_version: str,
    vectors: Vectors,
    *,
    cohere: bool,
) -> bytes:
    """/v1/rerank as Jina writes it, and /v2/rerank as Cohere does. `documents`: to be repeated beside their scores;
    `top_n`: 0 is all."""
    found = scores_of(pairs, vectors)
    best = sorted(range(len(found)), key=lambda index: (-found[index], index))
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": found[index]} for index in best[: top_n or None]
    ]
    if documents is not None:
        results = [{**each, "document": {"text": documents[each["index"]]}} for each in results]
    tokens = {"input_tokens": spec.prompt_tokens}
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens}
    end = {"meta": meta} if cohere else {"usage": _usage(spec)}
    about = {"id": spec.answer_id, "model": spec.model, "results": results, "weights_version": weights_version}
    return encode_json(about | end)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    return max(-1.0, min(1.0, float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)))
