"""Answers of /v1/decisions, and scores of labels: probabilities, as the model's next token has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.server.encoding import encode_json, encode_object
from quire.server.generation.answers.responses import usage_fields
from quire.server.generation.answers.writer import WholeWriter
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.questions import Question


class LabelScoresWriter(WholeWriter):
    """SGLang's /v1/score."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (question,) = self._spec.questions
        about = {"object": "scoring", "model": self._spec.model, "weights_version": self.weights_version}
        found = [shares_of(question, answer) for answer in answers]
        return encode_json({"scores": found, **about, "usage": usage.as_dict()})


class DecisionsWriter(WholeWriter):
    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        told = [decided(question, answer) for question, answer in zip(self._spec.questions, answers, strict=True)]
        about = {"model": self._spec.model, "weights_version": self.weights_version}
        return encode_object({**about, "answers": told, "usage": usage_fields(usage)}, **self.receipted)


def decided(question: Question, answer: Answer) -> dict[str, Any]:
    shares = shares_of(question, answer)
    head: dict[str, Any] = {"type": question.type, "name": question.name}
    if question.type == "predicate":
        return {**head, "probability": shares[0]}
    best = max(range(len(shares)), key=lambda index: shares[index])
    head["confidence"] = shares[best]
    options = list(zip(question.options, shares, strict=True))
    if question.type == "choice":
        told: list[dict[str, Any]] = [{"value": value, "probability": share} for value, share in options]
        return {**head, "choice": question.options[best], "probabilities": told}
    told = [{"value": index, "label": label, "probability": share} for index, (label, share) in enumerate(options)]
    return {**head, "score": sum(index * share for index, share in enumerate(shares)), "probabilities": told}


def shares_of(question: Question, answer: Answer) -> list[float]:
    """The probability of each option, given that one of them is answered: a softmax over their tokens; of labels the
    probability among all tokens."""
    logprob = answer.tokens[0].logprob
    assert logprob is not None, "asked for"
    found = dict(logprob.top)
    values = [found[token] for token in question.tokens]
    if question.type == "labels":
        return [math.exp(value) for value in values]
    most = max(values)
    weights = [math.exp(value - most) if most > -math.inf else 1.0 for value in values]
    return [weight / sum(weights) for weight in weights]
