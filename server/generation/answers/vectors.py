"""Answers that are made of vectors: embeddings, scores, rankings and labels."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quire.server.encoding import encode_json
from quire.server.generation.vectors import VectorSpec


def _whole(spec: VectorSpec, weights_version: str, data: list[dict[str, Any]]) -> bytes:
    about = {"id": spec.answer_id, "object": "list", "created": int(time.time()), "model": spec.model}
    return encode_json({**about, "weights_version": weights_version, "data": data, "usage": _usage(spec)})


def _usage(spec: VectorSpec) -> dict[str, int]:
    return {"prompt_tokens": spec.prompt_tokens, "total_tokens": spec.prompt_tokens}


@dataclass(frozen=True, slots=True)
class EmbeddingsAnswer:
    """/v1/embeddings, and /pooling with other names."""

    encoding: Literal["float", "base64"]
    kind: Literal["embedding", "pooling"] = "embedding"
    size: int | None = None
    """Numbers of a vector, where each token of an input has one."""

    def body(self, spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
        key = "embedding" if self.kind == "embedding" else "data"
        data = [{"object": self.kind, "index": i, key: self._shown(each)} for i, each in enumerate(vectors)]
        return _whole(spec, weights_version, data)

    def _shown(self, vector: np.ndarray) -> object:
        if self.encoding == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist() if self.size is None else vector.reshape(-1, self.size).tolist()


@dataclass(frozen=True, slots=True)
class CohereEmbeddingsAnswer:
    """/v2/embed."""

    types: tuple[str, ...]
    texts: tuple[str, ...]

    def body(self, spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
        found = {kind: [_as_type(each, kind) for each in vectors] for kind in self.types}
        about = {"id": spec.answer_id, "model": spec.model, "response_type": "embeddings_by_type", "texts": self.texts}
        about["weights_version"] = weights_version
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": spec.prompt_tokens}}
        return encode_json({**about, "embeddings": found, "meta": meta})


def _as_type(vector: np.ndarray, kind: str) -> object:
    """A vector of float32 as Cohere's embedding_types have it."""
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    bits = np.packbits(vector > 0)
    return (bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)).tolist()


@dataclass(frozen=True, slots=True)
class LabelsAnswer:
    """/classify."""

    labels: tuple[str, ...]

    def body(self, spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
        data = [
            {
                "index": index,
                "label": self.labels[int(probabilities.argmax())],
                "probs": probabilities.tolist(),
                "num_classes": len(probabilities),
            }
            for index, probabilities in enumerate(vectors)
        ]
        return _whole(spec, weights_version, data)


@dataclass(frozen=True, slots=True)
class Scored:
    """What scores texts pair by pair."""

    pairs: Sequence[tuple[int, int]] | None
    """The two inputs of each score, whose embeddings' cosine it is; None: each input is a pair, its vector the
    score."""

    def scores(self, vectors: Sequence[np.ndarray]) -> list[float]:
        if self.pairs is None:
            return [float(vector[0]) for vector in vectors]
        return [cosine(vectors[first], vectors[second]) for first, second in self.pairs]


@dataclass(frozen=True, slots=True)
class ScoresAnswer:
    """/v1/score."""

    scored: Scored

    def body(self, spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
        scores = self.scored.scores(vectors)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return _whole(spec, weights_version, data)


@dataclass(frozen=True, slots=True)
class RankingAnswer:
    """/v1/rerank as Jina writes it, and /v2/rerank as Cohere does."""

    scored: Scored
    documents: Sequence[str] | None
    """To be repeated beside their scores."""
    top_n: int
    """0: all."""
    cohere: bool

    def body(self, spec: VectorSpec, weights_version: str, vectors: Sequence[np.ndarray]) -> bytes:
        scores = self.scored.scores(vectors)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]} for index in best[: self.top_n or None]
        ]
        if self.documents is not None:
            results = [{**each, "document": {"text": self.documents[each["index"]]}} for each in results]
        about: dict[str, Any] = {"id": spec.answer_id, "model": spec.model, "results": results}
        about["weights_version"] = weights_version
        if self.cohere:
            units = {"search_units": 1}
            about["meta"] = {
                "api_version": {"version": "2"},
                "billed_units": units,
                "tokens": {"input_tokens": spec.prompt_tokens},
            }
        else:
            about["usage"] = _usage(spec)
        return encode_json(about)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    a, b = first.astype(np.float64), second.astype(np.float64)
    return max(-1.0, min(1.0, float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)))
