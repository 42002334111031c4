"""vLLM's SamplingParams and companions. As in vLLM they are mutable, so each use checks them again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

import msgspec

from quire.engine.common import request_params
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar, ThinkingBudget
from quire.engine.text.structured_outputs import constraint_grammar, requested_constraints
from quire.engine.text.token_sequences.bad_words import bad_words_ids, check_allowed_tokens_remain
from quire.engine.text.token_sequences.sequence_breakers import sequence_breaker_ids
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.unsupported_options import suggest_nearest

_STRUCTURED_HINT = "use structured_outputs=StructuredOutputsParams(json=SCHEMA), or another way than json"
_VLLM_ALTERNATIVES = {
    "best_of": "request n answers and take the one with the highest cumulative_logprob",
    **dict.fromkeys(("guided_decoding", "response_format", "json_schema", "guided_json"), _STRUCTURED_HINT),
    "use_beam_search": "use LLM.beam_search",
    "length_penalty": "it is a parameter of LLM.beam_search's BeamSearchParams",
    "early_stopping": "LLM.beam_search ends when no hypothesis can become better",
    "spaces_between_special_tokens": "texts are decoded as the tokenizer says",
    "thinking_token_budget": "use thinking=ThinkingBudget(...)",
    "flat_logprobs": "logprobs are a list with a dict for each token",
    "repetition_detection": "only available in requests to the server",
    "extra_args": "no plugins read it",
}
_NON_ENGINE_FIELDS = (
    "bad_words",
    "dry_sequence_breakers",
    "structured_outputs",
    "truncate_prompt_tokens",
    "detokenize",
    "output_kind",
    "logits_processors",
)
_VOCABULARY_COUNT_FIELDS = ("logprobs", "prompt_logprobs")
"""Fields in which -1 means the vocabulary size."""
_T = TypeVar("_T")


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    """The whole answer so far, each time."""
    DELTA = 1
    """The part since the last output."""
    FINAL_ONLY = 2
    """The whole answer, once."""


def with_unknown_field_suggestions(kind: type[_T]) -> type[_T]:
    """Make the dataclass's constructor raise InvalidRequest, with a suggestion, for an unknown parameter."""
    original_init = kind.__init__
    names = list(kind.__annotations__)

    @wraps(original_init)
    def __init__(self: _T, *values: Any, **fields: Any) -> None:
        for name in fields:
            if name not in names:
                advice = _VLLM_ALTERNATIVES.get(name) or suggest_nearest(name, names) or f"known are {', '.join(names)}"
                raise InvalidRequest(f"{kind.__name__} has no {name}: {advice}", param=name)
        original_init(self, *values, **fields)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


@with_unknown_field_suggestions
@dataclass
class StructuredOutputsParams:
    """A constraint on the whole answer. Exactly one of the first six fields must be set."""

    json: str | Mapping[str, Any] | None = None
    """JSON schema, as an object or text."""
    regex: str | None = None
    """Regular expression in Rust's syntax."""
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Grammar in llguidance's Lark, or GBNF."""
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    """XGrammar's structural tag: an object or JSON text with `format`, or with `structures` and `triggers`."""
    disable_fallback: bool = False
    """Has no effect, like `disable_any_whitespace`, because the only backend allows at most one space after a comma or
    colon.
    """
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    """If True, schema objects with `properties` but no keyword such as additionalProperties allow no other properties.
    If False, they allow any, as JSON Schema defines.
    """

    def __post_init__(self) -> None:
        self.as_grammar()

    def as_grammar(self, tokenizer: Tokenizer | None = None) -> Grammar:
        """Convert to a grammar. Without a tokenizer, special tokens in structural tags are treated as text. Raises
        InvalidRequest.
        """
        (way, value), *others = requested_constraints(vars(self))
        if others:
            raise InvalidRequest("only one structured output can be requested", param="structured_outputs")
        if isinstance(value, tuple):
            value = list(value)
        value = dict(value) if isinstance(value, Mapping) else value
        return constraint_grammar(way, value, close=self.disable_additional_properties, tokenizer=tokenizer).grammar


@with_unknown_field_suggestions
@dataclass(kw_only=True)
class SamplingParams:
    """How to generate answers. The constructor and each use raise InvalidRequest, which names the field, for a wrong
    value.
    """

    n: int = 1
    temperature: float = 1.0
    """Below 1e-5, sampling is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: float = 0.0
    top_n_sigma: float = -1.0
    """0 and -1 keep the whole vocabulary."""
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    """Above 1, earlier tokens, including the prompt's, become less likely."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] | None = None
    """None means newline, colon, quotation mark and asterisk."""
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = 16
    """None allows answers up to the context length."""
    min_tokens: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    grammar: Grammar | None = None
    """A grammar from `json_grammar` or `choice_grammar`, as an alternative to structured_outputs."""
    thinking: ThinkingBudget | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """Number of most likely tokens to report with each sampled token. 0 reports only the sampled token, -1 the
    vocabulary.
    """
    logprob_token_ids: Sequence[int] | None = None
    """Tokens to report with each sampled token, instead of `logprobs`."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for the prompt's tokens."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    """Number of last prompt tokens to keep. -1 keeps all that leave room for one generated token."""
    detokenize: bool = True
    """If False, answers have no text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What AsyncLLM.generate yields. LLM always returns whole answers."""
    logits_processors: None = None
    """Must be None, because functions cannot be sent, checked and replayed. Use logit_bias, allowed_token_ids,
    bad_words or structured_outputs.
    """

    def __post_init__(self) -> None:
        self.as_sent()
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def as_sent(self, **resolved: Any) -> request_params.SamplingParams:
        """Convert to engine parameters. `resolved` overrides fields that need a tokenizer. Raises InvalidRequest."""
        self._check_non_engine_fields()
        names = [each.name for each in dataclasses.fields(self) if each.name not in _NON_ENGINE_FIELDS]
        fields = {name: _to_python(getattr(self, name)) for name in names}
        fields["stop"] = [self.stop] if isinstance(self.stop, str) else fields["stop"] or ()
        fields["stop_token_ids"] = fields["stop_token_ids"] or ()
        for name in _VOCABULARY_COUNT_FIELDS:
            fields[name] = None if fields[name] == -1 else fields[name]
        try:
            return msgspec.convert(fields | resolved, request_params.SamplingParams)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidRequest(f"sampling_params: {error}", param="sampling_params") from None

    def for_model(self, tokenizer: Tokenizer, vocab_size: int) -> request_params.SamplingParams:
        """Convert to engine parameters. Raises InvalidRequest, also for token ids outside the model's vocabulary,
        which may be larger than the tokenizer's.
        """
        resolved: dict[str, Any] = {"bad_words_ids": bad_words_ids(self.bad_words or (), tokenizer)}
        if self.structured_outputs is not None:
            resolved["grammar"] = self.structured_outputs.as_grammar(tokenizer)
        resolved |= {name: vocab_size for name in _VOCABULARY_COUNT_FIELDS if getattr(self, name) == -1}
        params = self.as_sent(**resolved)
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < vocab_size:
                    message = f"sampling_params: {name} has token id {token}, which is out of vocabulary"
                    raise InvalidRequest(message, param=name)
        check_allowed_tokens_remain(params, tokenizer.eos_token_ids)
        if params.has_dry:
            breaker_ids = sequence_breaker_ids(self.dry_sequence_breakers, tokenizer)
            params = msgspec.structs.replace(params, dry_sequence_breaker_ids=breaker_ids)
        return params

    def _check_non_engine_fields(self) -> None:
        if self.logits_processors is not None:
            message = (
                "logits_processors are not supported: functions cannot be sent, checked or replayed; use logit_bias, "
                "allowed_token_ids, bad_words or structured_outputs"
            )
            raise InvalidRequest(message, param="logits_processors")
        kinds: dict[str, Any] = {
            "bad_words": Sequence,
            "dry_sequence_breakers": Sequence,
            "structured_outputs": StructuredOutputsParams,
            "truncate_prompt_tokens": int,
            "detokenize": bool,
            "output_kind": RequestOutputKind,
        }
        for name, kind in kinds.items():
            value = _to_python(getattr(self, name))
            if value is not None and (not isinstance(value, kind) or (kind is Sequence and isinstance(value, str))):
                expected = "a list of strings" if kind is Sequence else f"of type {kind.__name__}"
                expected += "(json=SCHEMA) and its like" if name == "structured_outputs" else ""
                raise InvalidRequest(f"sampling_params: {name} must be {expected}, got {value!r}", param=name)
        for name in ("bad_words", "dry_sequence_breakers"):
            if any(not isinstance(text, str) for text in getattr(self, name) or ()):
                raise InvalidRequest(f"sampling_params: {name} must be a list of strings", param=name)
        if self.structured_outputs is not None and self.grammar is not None:
            raise InvalidRequest("only one of structured_outputs and grammar can be given", param="grammar")
        max_prompt_tokens = self.truncate_prompt_tokens
        if max_prompt_tokens is not None and max_prompt_tokens != -1 and max_prompt_tokens < 1:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")


def _to_python(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_to_python(key): _to_python(each) for key, each in value.items()}
    return [_to_python(each) for each in value] if isinstance(value, list | tuple | set) else value


@with_unknown_field_suggestions
@dataclass(kw_only=True)
class BeamSearchParams:
    """The constructor raises InvalidRequest for a wrong value."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Must be 0."""
    length_penalty: float = 1.0
    """Above 1 favors longer answers, below 1 shorter ones."""

    def __post_init__(self) -> None:
        for name, most in (("beam_width", 128), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidRequest(f"{name} must be at least 1 and at most {most}, got {value!r}", param=name)
        if self.temperature != 0:
            raise InvalidRequest(
                "temperature must be 0: beam search looks for the most likely answer", param="temperature"
            )


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: Callable[[], SamplingParams]
) -> list[SamplingParams]:
    """Raises InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [params or default()] * count
    many: list[Any] = list(params) if isinstance(params, list | tuple) else [params]
    if wrong := [one for one in many if not isinstance(one, SamplingParams)]:
        raise InvalidRequest(f"sampling_params must be SamplingParams, got {wrong[0]!r}", param="sampling_params")
    if len(many) != count:
        raise InvalidRequest(f"sampling_params: {len(many)} for {count} prompts", param="sampling_params")
    return many


def priority_per_prompt(priority: Sequence[int] | None, count: int) -> list[int]:
    """Raises InvalidRequest."""
    plain = _to_python(priority)
    priorities = [0] * count if priority is None else plain if isinstance(plain, list) else []
    if len(priorities) != count or not all(isinstance(each, int) for each in priorities):
        raise InvalidRequest(f"priority: {count} prompts need a list of as many integers", param="priority")
    return priorities
