"""Answers in llama.cpp's form. Streams have no [DONE]. Instead, each choice's last event has `stop`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.common import clock
from quire.engine.text.tokenizer import Tokenizer
from quire.server.encoding import EVENT_END, EVENT_PREFIX, encode_json, encode_with_raw_fields, join_json_array
from quire.server.error_responses import error_info
from quire.server.generation.choice_state import AnswerToken, ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.output_parts import CollectedChoice
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.response_writers.logprob_fields import chat_logprobs

ANY_SLOT = -1
"""Requests have no slots here, because all of them run in the same steps."""
RANDOM_SEED = 2**32 - 1
"""llama.cpp reports this seed if the request's seed is -1."""


@dataclass(frozen=True, slots=True)
class LlamaCppFields:
    context_length: int
    samplers: Sequence[str]
    prompt: str | None = None
    """None if the answer does not repeat the prompt."""
    response_fields: Sequence[str] | None = None
    """Paths of the fields to return. None returns all."""
    return_tokens: bool = False


@dataclass(slots=True)
class _Choice:
    num_tokens: int = 0
    has_new_line: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class _Timings:
    began: float = field(default_factory=clock.monotonic)

    def to_json(self, usage: Usage, num_tokens: int) -> dict[str, object]:
        now = clock.monotonic()
        first = now if usage.first_token_time is None else usage.first_token_time
        num_computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "cache_n": usage.cached_tokens,
            **_speeds("prompt", num_computed, (first - self.began) * 1e3),
            **_speeds("predicted", num_tokens, (now - first) * 1e3),
        }


def _speeds(phase: str, count: int, milliseconds: float) -> dict[str, object]:
    return {
        f"{phase}_n": count,
        f"{phase}_ms": milliseconds,
        f"{phase}_per_token_ms": milliseconds / count if count else 0.0,
        f"{phase}_per_second": count / milliseconds * 1e3 if milliseconds > 0 else 0.0,
    }


class LlamaCppWriter(AnswerWriter):
    def __init__(
        self, fields: LlamaCppFields, request: GenerationRequest, tokenizer: Tokenizer, fingerprint: str
    ) -> None:
        super().__init__(request, tokenizer, fingerprint)
        self._fields = fields
        self._timings = _Timings()
        self._choices = [_Choice() for _ in range(request.num_choices)]

    def step_events(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join(self._choice_event(delta) for delta in deltas)

    def _choice_event(self, delta: ChoiceDelta) -> bytes:
        choice = self._choices[delta.index]
        choice.num_tokens += len(delta.token_ids)
        choice.has_new_line |= "\n" in delta.text
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if not (delta.text or delta.token_ids or delta.tokens):
            return b""
        event: dict[str, object] = {
            "index": delta.index,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": ANY_SLOT,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": self._request.prompt_tokens,
            **self._probability_fields(delta.tokens),
        }
        return EVENT_PREFIX + encode_json(event) + EVENT_END

    def last_events(self, usage: Usage) -> bytes:
        bodies = [self._final_fields(i, each, "", (), usage) for i, each in enumerate(self._choices)]
        return b"".join(EVENT_PREFIX + each + EVENT_END for each in self._encode_finals(bodies))

    def error_event(self, error: Exception) -> bytes:
        return EVENT_PREFIX + error_info(error).encode_llama_cpp() + EVENT_END

    def response_body(self, answers: Sequence[CollectedChoice], usage: Usage) -> bytes:
        bodies = []
        for answer in answers:
            text = answer.text
            choice = _Choice(len(answer.token_ids), "\n" in text, answer.finish_reason, answer.stop_reason)
            tokens = answer.token_ids if self._fields.return_tokens else ()
            body = self._final_fields(answer.index, choice, text, tokens, usage)
            bodies.append(body | self._probability_fields(answer.tokens))
        encoded = self._encode_finals(bodies)
        return encoded[0] if len(encoded) == 1 else join_json_array(encoded)

    def _encode_finals(self, bodies: Sequence[dict[str, object]]) -> list[bytes]:
        selected = [select_fields(body, self._fields.response_fields) for body in bodies]
        if not self.receipt_field:
            return [encode_json(each) for each in selected]
        *others, last = selected
        last = last or {"stop": True}
        return [*map(encode_json, others), encode_with_raw_fields(last, **self.receipt_field)]

    def _final_fields(
        self, index: int, choice: _Choice, content: str, tokens: Sequence[int], usage: Usage
    ) -> dict[str, object]:
        num_used = usage.prompt_tokens + choice.num_tokens
        fields = self._fields
        type_of_stop = stop_type(choice.finish_reason, choice.stop_reason)
        return {
            "index": index,
            "content": content,
            "tokens": tokens,
            "id_slot": ANY_SLOT,
            "stop": True,
            "model": self._request.model,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self._generation_settings(),
            **({} if fields.prompt is None else {"prompt": fields.prompt}),
            "has_new_line": choice.has_new_line,
            "truncated": choice.finish_reason == "length" and num_used >= fields.context_length,
            "stop_type": type_of_stop,
            "stopping_word": choice.stop_reason if type_of_stop == "word" else "",
            "tokens_cached": num_used,
            "timings": self._timings.to_json(usage, choice.num_tokens),
        }

    def _generation_settings(self) -> dict[str, object]:
        params, request = self._request.params, self._request
        count = 0 if request.prompt_only else -1 if params.max_tokens is None else params.max_tokens
        seed = request.answer_identity.seed
        rule = request.line_rule
        return {
            "n_ctx": self._fields.context_length,
            "n_predict": count,
            "max_tokens": count,
            "seed": RANDOM_SEED if seed is None else seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "top_n_sigma": params.top_n_sigma,
            "typical_p": params.typical_p,
            "xtc_probability": params.xtc_probability,
            "xtc_threshold": params.xtc_threshold,
            "dry_multiplier": params.dry_multiplier,
            "dry_base": params.dry_base,
            "dry_allowed_length": params.dry_allowed_length,
            "dry_penalty_last_n": params.dry_penalty_last_n,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": params.ignore_eos,
            "stop": params.stop,
            "stream": request.stream,
            "n_probs": params.logprobs or 0,
            "n_indent": 0 if rule is None else rule.min_indent,
            "samplers": self._fields.samplers,
        }

    def _probability_fields(self, tokens: Sequence[AnswerToken]) -> dict[str, object]:
        if not tokens:
            return {}
        entries = chat_logprobs(tokens, self._tokenizer)["content"]
        for entry, token in zip(entries, tokens, strict=True):
            assert token.logprob is not None, "prompts are not echoed"
            entry["id"] = token.token_id
            for other, (token_id, _) in zip(entry["top_logprobs"], token.logprob.top, strict=True):
                other["id"] = token_id
        return {"completion_probabilities": entries}


def stop_type(finish_reason: str | None, stop_reason: int | str | None) -> str:
    match finish_reason:
        case None:
            return "none"
        case "stop":
            return "word" if isinstance(stop_reason, str) else "eos"
    return "limit"


def select_fields(body: dict[str, object], paths: Sequence[str] | None) -> dict[str, object]:
    """A path such as timings/prompt_ms names a nested field. Unknown paths are ignored."""
    if paths is None:
        return body
    selected = {}
    for path in paths:
        value: object = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            selected[path] = value
    return selected
