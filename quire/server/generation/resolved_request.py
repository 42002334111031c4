"""The resolved form of a request: all endpoints translate their bodies to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import msgspec

from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest, Image, MediaSpan
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.protocol.request_bodies import IGNORED_PARAMS_HEADER
from quire.server.store.response_store import StoredItem

QuestionType = Literal["predicate", "choice", "score", "labels", "shares"]
"""labels: how likely each token is among all; shares: among these."""


@dataclass(frozen=True, slots=True)
class OptionQuestion:
    """A question that one token answers: one of /v1/decisions, or the labels of a score."""

    type: QuestionType
    name: str | None
    options: Sequence[str | bool]
    """The possible answers: yes and no of a predicate, values of a choice, the levels' labels of a score."""
    option_token_ids: Sequence[int]
    """The token that stands for each option."""


@dataclass(frozen=True, slots=True)
class ResponsesApiFields:
    """The fields of a call of the Responses API that do not concern its generation."""

    echoed_fields: bytes
    """The request's fields that the answer repeats: a JSON object, written once."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace and the name in it, of the tools that have one."""
    encrypts_reasoning: bool = False
    """Whether reasoning items carry their text as encrypted_content too."""
    store: bool = False
    background: bool = False
    input_items: Sequence[StoredItem] = ()
    """The items to store: those of this request alone."""
    previous_id: str | None = None
    """The id of the response before it."""
    conversation_id: str | None = None
    """The id of the conversation that it is part of."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None = None
    """What `echo` repeats; None where the prompt is known by its ids alone."""
    offsets: Sequence[int] = ()
    """Where each of the ids begins in that text, in characters; empty where nobody asks."""
    spans: tuple[MediaSpan, ...] = ()
    """Ids that stand for images."""
    images: tuple[Image, ...] = ()
    """The content of each span, once."""
    adaptations: str = ""
    """How a conversation was adapted to what its template takes; "": not at all."""


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """An answer ends when its last tokens are min_count times the same pattern: vLLM's repetition_detection."""

    max_pattern_size: int
    """In tokens; 0 detects nothing."""
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request, and what its headers ask for. The station `authorize` makes it."""

    tenant: str = ""
    """The tenant charged."""
    weight: float = 1.0
    """The tenant's share."""
    priority: int = 0
    """The body's, or the one that a trusted gateway sets."""
    cache_salt: str = ""
    """The body's, made the tenant's own."""
    adapter: Adapter | None = None
    """The adapter that the request's model name stands for, if it is an adapter's."""
    chosen_id: str = ""
    """The answer's id by the header X-Request-Id."""
    include_receipt: bool = False
    """The answer gives a receipt."""
    record_receipt: bool = False
    """What a receipt needs is recorded, for the answer or for the receipt log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerIdentity:
    """What makes this answer the one that it is, and the same one when it is computed again. The station `identify`
    makes it: of fresh values, or of those in the journal."""

    id: str
    """No other answer has it. The ids of its sequences begin with it."""
    requested_id: str = ""
    """The answer's id, if the caller chose one; another answer may have the same."""
    created: int = 0
    """In seconds of the Unix clock."""
    seed: int | None = None
    """The body's, or one that was drawn so that the answer can be computed again."""
    resumable: bool = False
    """Its events are numbered, and always the same: each token is a step of its own."""
    num_earlier_attempts: int = 0
    """How often the answer was made before."""
    ignored_headers: str = ""
    """Headers of the request that have no effect, as the answer's header names them."""


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """The grammar that the answers match, which compiles."""

    field: str
    """The request's field that it comes from."""
    grammar: Grammar
    headers: Mapping[str, str]
    """What the answer's headers say of its schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """A request as it passes through the stations of server/pipeline. Each station completes the field that is its own,
    once; nothing that one station set is changed by another. This class has what generations and vectors share."""

    id_prefix: str = ""
    """The beginning of the ids of all answers of this endpoint."""
    body_id: str = ""
    """The answer's id by the body's field request_id."""
    model: str
    """The name that the answer gives the model."""
    body_priority: int = 0
    body_cache_salt: str = ""
    timeout: float | None = None
    """Seconds in which the answer must be complete."""
    queue_timeout: float | None = None
    """Seconds in which the first token, or the first vector, must come."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the response, as far as the body decides them."""
    caller: Caller | None = None
    """Completed by `authorize`."""
    identity: AnswerIdentity | None = None
    """Completed by `identify`."""

    def with_caller(self, caller: Caller) -> Self:
        assert self.caller is None, "authorized once"
        return replace(self, caller=caller)

    def with_identity(self, identity: AnswerIdentity) -> Self:
        assert self.identity is None, "identified once"
        return replace(self, identity=identity)

    @property
    def authorized_caller(self) -> Caller:
        assert self.caller is not None, "not authorized yet"
        return self.caller

    @property
    def answer_identity(self) -> AnswerIdentity:
        assert self.identity is not None, "not identified yet"
        return self.identity

    @property
    def id(self) -> str:
        return self.answer_identity.id

    @property
    def answer_id(self) -> str:
        """The id that the caller sees."""
        return self.answer_identity.requested_id or self.answer_identity.id

    @property
    def created(self) -> int:
        return self.answer_identity.created

    @property
    def adapter(self) -> Adapter | None:
        return self.authorized_caller.adapter

    @property
    def response_headers(self) -> dict[str, str]:
        ignored = [self.headers.get(IGNORED_PARAMS_HEADER), self.answer_identity.ignored_headers]
        names = ", ".join(filter(None, ignored))
        return {**self.headers, IGNORED_PARAMS_HEADER: names} if names else dict(self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ResolvedRequest):
    """What to generate and how to answer it: n choices for each prompt. Choice i of prompt p has index p * n + i."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    """Those of the body: without the grammar, and with the seed that the caller gave. `sampling_params` has all."""
    num_returned: int
    """The number of choices for each prompt that a whole answer shows, the most likely ones; n at most."""
    session_id: str = ""
    """The conversation that it is a turn of, by the caller's name for it."""
    keep_seconds: float = 0.0
    """How long the conversation is to be kept; 0: it is not."""
    checked_grammar: CheckedGrammar | None = None
    """Completed by `check_grammars`; None: the answers are any text."""

    beam_search: bool = False
    """Search for the n most likely hypotheses instead of sampling."""
    length_penalty: float = 1.0
    """Of beam search."""
    repetition_rule: RepetitionRule | None = None
    message_format: RequestMessageFormat | None = None
    """How to read reasoning and tool calls out of the answers; None: all of their text is content."""

    stream: bool = False
    include_usage: bool = False
    """The last event of a stream gives the usage."""
    continuous_usage: bool = False
    """Every event of a stream gives the usage so far."""
    echo: bool = False
    """Answers begin with their prompt's text."""
    echo_only: bool = False
    """Answers are their prompt alone: the one token that the engine must generate is dropped."""
    logprobs: bool = False
    """Answers give log probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives to give for each token of the prompt; None: its log probabilities are not given."""
    return_token_ids: bool = False
    """Answers give the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:123`."""
    include_metrics: bool = False
    """Whether its usage tells when what came: of one answer."""
    body_receipt: bool = False
    """The body asks for a receipt."""
    allows_receipt: bool = True
    """Whether the answer can have a receipt: not if nothing is generated that anybody reads."""
    responses_fields: ResponsesApiFields | None = None
    """Of a call of the Responses API."""
    questions: Sequence[OptionQuestion] = ()
    """Of a call of the Decisions API, one for each prompt."""

    def with_checked_grammar(self, checked_grammar: CheckedGrammar) -> GenerationRequest:
        assert self.checked_grammar is None, "checked once"
        return replace(self, checked_grammar=checked_grammar)

    @property
    def sampling_params(self) -> SamplingParams:
        """The body's parameters with the checked grammar and the answer's seed."""
        grammar = None if self.checked_grammar is None else self.checked_grammar.grammar
        return msgspec.structs.replace(self.params, grammar=grammar, seed=self.answer_identity.seed)

    @property
    def response_headers(self) -> dict[str, str]:
        schema_headers = {} if self.checked_grammar is None else self.checked_grammar.headers
        return {**super(GenerationRequest, self).response_headers, **schema_headers}

    @property
    def custom_tool_names(self) -> frozenset[str]:
        return frozenset() if self.message_format is None else self.message_format.custom_tool_names

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together. A prompt counts once, however many choices continue it."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def system_fingerprint(self, model_fingerprint: str) -> str:
        """ServedModel.fingerprint, with the content of the adapter, which decides the tokens too."""
        known, _, promise = model_fingerprint.rpartition("_")
        return model_fingerprint if self.adapter is None else f"{known}-{self.adapter.digest[:12]}_{promise}"

    def engine_requests(self) -> list[EngineCoreRequest]:
        """One for each choice, in order of their indices."""
        params = self.sampling_params
        single_params = msgspec.structs.replace(params, n=1)
        num_attempts = self.answer_identity.num_earlier_attempts
        suffix = f".{num_attempts}" if num_attempts else ""
        return [
            self.engine_request(
                f"{self.id}-{index}{suffix}",
                self.prompts[index // params.n],
                single_params,
                params.choice_seed(index % params.n),
            )
            for index in range(self.num_choices)
        ]

    def engine_request(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        generated_ids: Sequence[int] = (),
    ) -> EngineCoreRequest:
        """The engine's request for one sequence; `generated_ids`: tokens behind the prompt."""
        caller = self.authorized_caller
        return EngineCoreRequest(
            id=id,
            prompt_ids=[*prompt.ids, *generated_ids] if generated_ids else prompt.ids,
            spans=prompt.spans,
            images=prompt.images,
            params=params,
            seed=seed,
            cache_salt=caller.cache_salt,
            session=self.session_id,
            keep_seconds=self.keep_seconds,
            priority=caller.priority,
            tenant=caller.tenant,
            weight=caller.weight,
            adapter=caller.adapter,
        )
