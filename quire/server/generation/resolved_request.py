"""ResolvedRequest, to which all endpoints translate their bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import msgspec

from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest, Image, MediaSpan
from quire.server.cache_diagnostics import CacheDiagnosis, PromptFingerprint
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.protocol.request_bodies import IGNORED_PARAMS_HEADER
from quire.server.store.response_store import StoredItem

QuestionType = Literal["predicate", "choice", "score", "labels", "shares"]
""" "labels" asks for each label's probability among all tokens, "shares" for its probability among the labels."""


@dataclass(frozen=True, slots=True)
class OptionQuestion:
    type: QuestionType
    name: str | None
    options: Sequence[str | bool]
    """A predicate's booleans, a choice's values, or a score's level labels."""
    option_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResponsesApiFields:
    echoed_fields: bytes
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Maps a tool's name to its namespace and its name in the namespace."""
    encrypts_reasoning: bool = False
    store: bool = False
    background: bool = False
    input_items: Sequence[StoredItem] = ()
    cache_for_websocket: bool = False
    previous_id: str | None = None
    conversation_id: str | None = None
    continues_unstored_response: bool = False
    """The previous response is only in a WebSocket's memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None = None
    """None if only ids are known."""
    offsets: Sequence[int] = ()
    """Position of each id in `text`, in characters. May be empty."""
    spans: tuple[MediaSpan, ...] = ()
    """Ranges of the ids that are placeholders of images."""
    images: tuple[Image, ...] = ()
    """The images that the spans refer to, each once."""
    adaptations: str = ""


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """vLLM's repetition_detection: an answer ends when its last tokens are `min_count` repetitions of one pattern."""

    max_pattern_size: int
    """In tokens; 0 disables the rule."""
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class LineRule:
    """llama.cpp's n_indent and t_max_predict_ms, which end an answer early."""

    min_indent: int = 0
    """The answer ends at a line, other than the first, that begins with fewer spaces and tabs than this."""
    max_seconds: float | None = None
    """Seconds after the first token. The first newline after this time ends the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    """Made from the body's salt and the tenant."""
    adapter: Adapter | None = None
    """None if the model name is not an adapter's."""
    chosen_id: str = ""
    include_receipt: bool = False
    record_receipt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerIdentity:
    """The station `identify` sets it, from the earlier attempt if there is one."""

    id: str
    """Unique; prefix of the engine request ids."""
    requested_id: str = ""
    """Chosen by the caller; may not be unique."""
    created: int = 0
    """Unix time in seconds."""
    seed: int | None = None
    """The body's seed, or a drawn one."""
    resumable: bool = False
    """True if events are numbered and reproducible, because each token is a step."""
    num_earlier_attempts: int = 0
    cache_diagnosis: CacheDiagnosis | None = None
    ignored_headers: str = ""
    """Comma-separated."""


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    field: str
    grammar: Grammar
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """Each station of server/pipeline sets its own field once."""

    id_prefix: str = ""
    body_id: str = ""
    model: str
    body_priority: int = 0
    body_cache_salt: str = ""
    timeout: float | None = None
    """Seconds until the answer must be complete."""
    queue_timeout: float | None = None
    """Seconds within which the first token or vector must come."""
    headers: Mapping[str, str] = field(default_factory=dict)
    caller: Caller | None = None
    identity: AnswerIdentity | None = None

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
        return self.answer_identity.requested_id or self.answer_identity.id

    @property
    def created(self) -> int:
        return self.answer_identity.created

    @property
    def adapter(self) -> Adapter | None:
        return self.authorized_caller.adapter

    @property
    def has_deadline(self) -> bool:
        return self.timeout is not None or self.queue_timeout is not None

    @property
    def response_headers(self) -> dict[str, str]:
        ignored = [self.headers.get(IGNORED_PARAMS_HEADER), self.answer_identity.ignored_headers]
        names = ", ".join(filter(None, ignored))
        return {**self.headers, IGNORED_PARAMS_HEADER: names} if names else dict(self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ResolvedRequest):
    """Choice i of prompt p has index p * n + i."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    """Without the grammar and drawn seed, which `sampling_params` adds."""
    num_returned: int
    """Number of choices per prompt, at most n, that a whole answer returns."""
    session_id: str = ""
    keep_seconds: float = 0.0
    """How long the conversation's KV blocks are kept."""
    checked_grammar: CheckedGrammar | None = None

    beam_search: bool = False
    length_penalty: float = 1.0
    repetition_rule: RepetitionRule | None = None
    line_rule: LineRule | None = None
    message_format: RequestMessageFormat | None = None
    """None if all text is content."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_only: bool = False
    """Drop the one token that the engine must generate."""
    logprobs: bool = False
    prompt_logprobs: int | None = None
    """Number of alternatives per prompt token. None omits the field from the answer."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:123`."""
    include_metrics: bool = False
    """Only with one choice."""
    body_receipt: bool = False
    allows_receipt: bool = True
    responses_fields: ResponsesApiFields | None = None
    fingerprint: PromptFingerprint | None = None
    """The prompt's fingerprint, still without the model. None if later prompts cannot be compared with this one."""
    comparison_id: str = ""
    questions: Sequence[OptionQuestion] = ()

    def with_checked_grammar(self, checked_grammar: CheckedGrammar) -> GenerationRequest:
        assert self.checked_grammar is None, "checked once"
        return replace(self, checked_grammar=checked_grammar)

    @property
    def sampling_params(self) -> SamplingParams:
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
        return sum(len(prompt.ids) for prompt in self.prompts)

    def system_fingerprint(self, model_fingerprint: str) -> str:
        """Adds the adapter's digest, because adapters change tokens."""
        known, _, promise = model_fingerprint.rpartition("_")
        return model_fingerprint if self.adapter is None else f"{known}-{self.adapter.digest[:12]}_{promise}"

    def engine_requests(self) -> list[EngineCoreRequest]:
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
