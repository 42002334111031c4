"""Answers made of next-token probabilities: /v1/decisions, /v1/systemone and label scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.engine.common import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_json, encode_with_raw_fields
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice
from quire.server.generation.resolved_request import GenerationRequest, OptionQuestion
from quire.server.generation.response_writers.answer_writer import UnstreamableAnswerWriter
from quire.server.generation.response_writers.responses import responses_usage


class LabelScoresWriter(UnstreamableAnswerWriter):
    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        (question,) = self._request.questions
        about = {"object": "scoring", "model": self._request.model, "weights_version": self.weights_version}
        scores = [option_probabilities(question, answer) for answer in answers]
        return encode_json({"scores": scores, **about, "usage": usage.to_openai_usage()})


class DecisionsWriter(UnstreamableAnswerWriter):
    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        decisions = [
            decision_fields(question, answer) for question, answer in zip(self._request.questions, answers, strict=True)
        ]
        about = {"model": self._request.model, "weights_version": self.weights_version}
        return encode_with_raw_fields(
            {**about, "answers": decisions, "usage": responses_usage(usage)}, **self.receipt_field
        )


def decision_fields(question: OptionQuestion, answer: CollectedChoice) -> dict[str, Any]:
    probabilities_by_option = option_probabilities(question, answer)
    head: dict[str, Any] = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return {**head, "probability": probabilities_by_option[0]}
    best = max(range(len(probabilities_by_option)), key=lambda index: probabilities_by_option[index])
    head["confidence"] = probabilities_by_option[best]
    options = list(zip(question.options, probabilities_by_option, strict=True))
    if question.type == "choice":
        probabilities: list[dict[str, Any]] = [{"value": value, "probability": share} for value, share in options]
        return {**head, "choice": question.options[best], "probabilities": probabilities}
    probabilities = [
        {"value": index, "label": label, "probability": share} for index, (label, share) in enumerate(options)
    ]
    return {
        **head,
        "score": sum(index * share for index, share in enumerate(probabilities_by_option)),
        "probabilities": probabilities,
    }


def option_probabilities(question: OptionQuestion, answer: CollectedChoice) -> list[float]:
    """Returns a softmax over the options' tokens. For labels, returns their probabilities among the whole
    vocabulary.
    """
    logprob = answer.tokens[0].logprob
    assert logprob is not None, "asked for"
    logprobs_by_token = dict(logprob.top)
    values = [logprobs_by_token[token] for token in question.option_token_ids]
    if question.type == "labels":
        return [math.exp(value) for value in values]
    most = max(values)
    weights = [math.exp(value - most) if most > -math.inf else 1.0 for value in values]
    return [weight / sum(weights) for weight in weights]


class SystemOneApiWriter(UnstreamableAnswerWriter):
    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        pairs = zip(self._request.questions, answers, strict=True)
        answers_by_name = {
            question.name: systemone_api_fields(question, option_probabilities(question, answer))
            for question, answer in pairs
        }
        head = {"model": self._request.model, "answers": answers_by_name, "usage": responses_usage(usage)}
        head |= {"x_id": self._request.answer_id, "x_system_fingerprint": self._fingerprint}
        head["x_weights_version"] = self.weights_version
        return encode_with_raw_fields(head, **{f"x_{name}": value for name, value in self.receipt_field.items()})


def systemone_api_fields(question: OptionQuestion, shares: Sequence[float]) -> dict[str, Any]:
    if question.type == "predicate":
        return {"type": "noul", "noul": shares[0]}
    best = max(range(len(shares)), key=lambda index: shares[index])
    if question.type == "choice":
        probabilities = dict(zip(question.options, shares, strict=True))
        confidence = choice_confidence(shares)
        return {
            "type": "choice",
            "choice": question.options[best],
            "probabilities": probabilities,
            "confidence": confidence,
        }
    return {
        "type": "score",
        "score": sum(index * share for index, share in enumerate(shares)),
        "legend": {str(index): level for index, level in enumerate(question.options)},
        "probabilities": {str(index): share for index, share in enumerate(shares)},
        "confidence": score_confidence(shares),
    }


def choice_confidence(shares: Sequence[float]) -> float:
    """Returns 0 if all options are equally likely, and 1 if one is certain."""
    equal = 1 / len(shares)
    return clamp_probability((max(shares) - equal) / (1 - equal))


def score_confidence(shares: Sequence[float]) -> float:
    """Returns 1 - d / u, at least 0: d is the mean distance from the likeliest level, u that of equally likely levels
    from the middle level.
    """
    count = len(shares)
    mode = max(range(count), key=lambda index: shares[index])
    spread = sum(share * abs(index - mode) for index, share in enumerate(shares))
    equal = sum(abs(index - (count - 1) / 2) for index in range(count)) / count
    return clamp_probability(1 - spread / equal)


def clamp_probability(value: float) -> float:
    return min(max(value, 0.0), 1.0)


class SessionWarmupWriter(UnstreamableAnswerWriter):
    def __init__(self, session: str, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._session, self._start_time = session, clock.monotonic()

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        fields = {
            "object": "session.warmed",
            "id": self._session,
            "model": self._request.model,
            "tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "seconds": round(clock.monotonic() - self._start_time, 6),
            "weights_version": self.weights_version,
        }
        return encode_json(fields)
