"""All endpoints translate their bodies to a ResolvedRequest."""

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
"""labels: each label's probability among all tokens; shares: among the labels."""


@dataclass(frozen=True, slots=True)
class OptionQuestion:
    """Answered by one token. From /v1/decisions, or from /v1/score with label_token_ids."""

    type: QuestionType
    name: str | None
    options: Sequence[str | bool]
    """A predicate's booleans, a choice's values, or the labels of a score's levels."""
    option_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ResponsesApiFields:
    """Fields that do not affect generation."""

    echoed_fields: bytes
    """A JSON object."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tool name to (namespace, name in it)."""
    encrypts_reasoning: bool = False
    """Reasoning items also carry encrypted_content."""
    store: bool = False
    background: bool = False
    input_items: Sequence[StoredItem] = ()
    """This request's items to store or cache."""
    cache_for_websocket: bool = False
    """Keep the response in memory, for the WebSocket's next request."""
    previous_id: str | None = None
    conversation_id: str | None = None
    continues_unstored_response: bool = False
    """The previous response is only in a WebSocket's memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None = None
    """For `echo`; None if only ids are known."""
    offsets: Sequence[int] = ()
    """Start of each id in `text`, in characters; empty if not needed."""
    spans: tuple[MediaSpan, ...] = ()
    """Placeholder ids of images."""
    images: tuple[Image, ...] = ()
    """Content of the spans, each image once."""
    adaptations: str = ""
    """How the conversation was adapted to its template."""


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """vLLM's repetition_detection: an answer ends when its last tokens repeat a pattern `min_count` times."""

    max_pattern_size: int
    """In tokens; 0 disables the rule."""
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class LineRule:
    """llama.cpp's n_indent and t_max_predict_ms, which end an answer early."""

    min_indent: int = 0
    """The answer ends at a line, except the first, that begins with fewer spaces and tabs."""
    max_seconds: float | None = None
    """Counted from the first token. After this time, the answer ends at the next newline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Made by the station `authorize`."""

    tenant: str = ""
    weight: float = 1.0
    """Scheduling share."""
    priority: int = 0
    """From the body or a trusted gateway."""
    cache_salt: str = ""
    """Already specific to the tenant."""
    adapter: Adapter | None = None
    """None if the model name is not an adapter's."""
    chosen_id: str = ""
    """The X-Request-Id header."""
    include_receipt: bool = False
    record_receipt: bool = False
    """True if the answer or the receipt log needs a receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerIdentity:
    """Makes a recomputed answer the same one. Set by the station `identify`, from the journal if resumed."""

    id: str
    """Unique; prefix of the engine request ids."""
    requested_id: str = ""
    """Chosen by the caller; may not be unique."""
    created: int = 0
    """Unix time in seconds."""
    seed: int | None = None
    """From the body, or drawn so that the answer can be recomputed."""
    resumable: bool = False
    """Events are numbered and reproducible: each token is one step."""
    num_earlier_attempts: int = 0
    cache_diagnosis: CacheDiagnosis | None = None
    """Of the comparison with an earlier answer's prompt; None unless the body requests one."""
    ignored_headers: str = ""
    """Request headers without effect, comma-separated."""


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    field: str
    """The request field it came from."""
    grammar: Grammar
    headers: Mapping[str, str]
    """Response headers about its schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """Each station of server/pipeline sets its own field once."""

    id_prefix: str = ""
    body_id: str = ""
    """The body's request_id."""
    model: str
    """The model name in the answer."""
    body_priority: int = 0
    body_cache_salt: str = ""
    timeout: float | None = None
    """Seconds until the answer must be complete."""
    queue_timeout: float | None = None
    """Seconds until the first token or vector must arrive."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers that the body determines."""
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
    """Without the grammar and drawn seed that `sampling_params` adds."""
    num_returned: int
    """A whole answer returns this many choices per prompt, the most likely ones; at most n."""
    session_id: str = ""
    """The caller's name for the conversation."""
    keep_seconds: float = 0.0
    """How long to pin the conversation's KV blocks."""
    checked_grammar: CheckedGrammar | None = None
    """Set by `check_grammars`."""

    beam_search: bool = False
    length_penalty: float = 1.0
    """For beam search."""
    repetition_rule: RepetitionRule | None = None
    line_rule: LineRule | None = None
    message_format: RequestMessageFormat | None = None
    """None if all text is content."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Each stream event contains the usage so far."""
    echo: bool = False
    prompt_only: bool = False
    """Drop the one token that the engine must generate."""
    logprobs: bool = False
    prompt_logprobs: int | None = None
    """Alternatives per prompt token; None omits the field."""
    return_token_ids: bool = False
    """Of prompt and answer."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:123`."""
    include_metrics: bool = False
    """Adds timings to the usage; only with one choice."""
    body_receipt: bool = False
    allows_receipt: bool = True
    """False if no caller reads what is generated."""
    responses_fields: ResponsesApiFields | None = None
    fingerprint: PromptFingerprint | None = None
    """Without a model. None if later prompts cannot be compared with this one."""
    comparison_id: str = ""
    """Id of the earlier answer whose prompt is compared with this one."""
    questions: Sequence[OptionQuestion] = ()
    """For the Decisions API, one per prompt."""

    def with_checked_grammar(self, checked_grammar: CheckedGrammar) -> GenerationRequest:
        assert self.checked_grammar is None, "checked once"
        return replace(self, checked_grammar=checked_grammar)

    @property
    def sampling_params(self) -> SamplingParams:
        """Include the checked grammar and the answer's seed."""
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
        """Count each prompt once, regardless of `n`."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def system_fingerprint(self, model_fingerprint: str) -> str:
        """Add the adapter's digest, which determines tokens too, to ServedModel.fingerprint."""
        known, _, promise = model_fingerprint.rpartition("_")
        return model_fingerprint if self.adapter is None else f"{known}-{self.adapter.digest[:12]}_{promise}"

    def engine_requests(self) -> list[EngineCoreRequest]:
        """One per choice, in index order."""
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
        """`generated_ids` follow the prompt."""
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
