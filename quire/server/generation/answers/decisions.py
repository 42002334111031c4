"""Answers of /v1/decisions and /v1/systemone, and scores of labels: the probabilities of the model's next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.engine import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import encode_json, encode_object
from quire.server.generation.answers.responses import usage_fields
from quire.server.generation.answers.writer import WholeWriter
from quire.server.generation.fold import Answer
from quire.server.generation.generation import Usage
from quire.server.generation.spec import GenerationSpec, Question


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
    """The probability of each option on condition that one of them is the answer: a softmax over the options' tokens.
    For labels: the probability among all tokens."""
    logprob = answer.tokens[0].logprob
    assert logprob is not None, "asked for"
    found = dict(logprob.top)
    values = [found[token] for token in question.tokens]
    if question.type == "labels":
        return [math.exp(value) for value in values]
    most = max(values)
    weights = [math.exp(value - most) if most > -math.inf else 1.0 for value in values]
    return [weight / sum(weights) for weight in weights]


class SystemOneWriter(WholeWriter):
    """Writes decisions in the fields of the System One API. Fields that its specification does not have begin with
    x_."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        pairs = zip(self._spec.questions, answers, strict=True)
        told = {question.name: evaluated(question, shares_of(question, answer)) for question, answer in pairs}
        head = {"model": self._spec.model, "answers": told, "usage": usage_fields(usage)}
        head |= {"x_id": self._spec.answer_id, "x_system_fingerprint": self._fingerprint}
        head["x_weights_version"] = self.weights_version
        return encode_object(head, **{f"x_{name}": value for name, value in self.receipted.items()})


def evaluated(question: Question, shares: Sequence[float]) -> dict[str, Any]:
    if question.type == "predicate":
        return {"type": "noul", "noul": shares[0]}
    best = max(range(len(shares)), key=lambda index: shares[index])
    if question.type == "choice":
        chances = dict(zip(question.options, shares, strict=True))
        sure = confidence_of_choice(shares)
        return {"type": "choice", "choice": question.options[best], "probabilities": chances, "confidence": sure}
    return {
        "type": "score",
        "score": sum(index * share for index, share in enumerate(shares)),
        "legend": {str(index): level for index, level in enumerate(question.options)},
        "probabilities": {str(index): share for index, share in enumerate(shares)},
        "confidence": confidence_of_score(shares),
    }


def confidence_of_choice(shares: Sequence[float]) -> float:
    """How far the likeliest option is above an equal share: 0 if all are equally likely, 1 if it is certain."""
    equal = 1 / len(shares)
    return within((max(shares) - equal) / (1 - equal))


def confidence_of_score(shares: Sequence[float]) -> float:
    """1 minus the mean distance from the likeliest level, divided by the same distance for equal shares around the
    middle level."""
    count = len(shares)
    mode = max(range(count), key=lambda index: shares[index])
    spread = sum(share * abs(index - mode) for index, share in enumerate(shares))
    equal = sum(abs(index - (count - 1) / 2) for index in range(count)) / count
    return within(1 - spread / equal)


def within(value: float) -> float:
    """From 0 to 1, whatever rounding does."""
    return min(max(value, 0.0), 1.0)


class WarmedWriter(WholeWriter):
    """Tells how much of the conversation was cached, and how much was computed."""

    def __init__(self, session: str, spec: GenerationSpec, tokenizer: Tokenizer, fingerprint: str) -> None:
        super().__init__(spec, tokenizer, fingerprint)
        self._session, self._began = session, clock.monotonic()

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        told = {
            "object": "session.warmed",
            "id": self._session,
            "model": self._spec.model,
            "tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "seconds": round(clock.monotonic() - self._began, 6),
            "weights_version": self.weights_version,
        }
        return encode_json(told)
