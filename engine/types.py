"""What flows between server and engine: requests, outputs, and what the engine says of itself. All frozen structs.

What a step is made of is in engine/batch.py.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Literal

import msgspec

from quire.engine.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
Phase = Literal["queued", "preempted", "prefill", "decode"]
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""In all stop strings together: text that is held back is compared with each."""
_MOST_TOKENS = 2**31 - 1


class Grammar(msgspec.Struct, frozen=True):
    """What the whole text of an answer must match; engine/text/grammar.py makes them."""

    kind: Literal["json", "regex", "lark"]
    text: str
    """A JSON schema, a regular expression of Rust's kind, or llguidance's Lark."""


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The most tokens that a model may think; after them the token that ends the thinking is picked."""

    tokens: int
    end_id: int
    begin_id: int | None
    """The token that begins the thinking, where the model decides whether it thinks. None: every answer starts inside
    the thinking."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sampling"):
    """How to pick tokens and when to end. Raises InvalidRequest, naming the field, for a value out of range."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Keskar et al., 2019: divides positive and multiplies negative logits of every token seen, prompt included."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are ever picked."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain."""
    max_tokens: int | None = 16
    """None: up to the context length."""
    min_tokens: int = 0
    grammar: Grammar | None = None
    """The answer ends when it is complete, whatever min_tokens and ignore_eos say."""
    thinking: ThinkingBudget | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """Number of most likely tokens to report beside each picked one; 0 reports the picked one alone."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.stop, tuple):  # one string, or a list
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            msgspec.structs.force_setattr(self, "stop", stop)
        _within("n", self.n, 1, 128)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, above=True)
        _within("top_k", self.top_k, -1, _MOST_TOKENS)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, None, above=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("max_tokens", self.max_tokens, 1, _MOST_TOKENS)
        _within("min_tokens", self.min_tokens, 0, _MOST_TOKENS)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        _within("logprobs", self.logprobs, 0, _MOST_TOKENS)
        _within("prompt_logprobs", self.prompt_logprobs, 0, _MOST_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string", param="stop")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            message = f"stop must not contain more than {MAX_STOP_CHARACTERS} characters in all"
            raise InvalidRequest(message, param="stop")
        for bias in (self.logit_bias or {}).values():
            _within("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if not all(self.bad_words_ids):
            raise InvalidRequest("bad_words must not contain an empty word", param="bad_words")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def choice_seed(self, choice: int) -> int:
        """The seed of one of n choices, 63 bits; random if the request has none. The first choice takes the request's
        own seed, so it does not depend on n."""
        if self.seed is None:
            return secrets.randbits(63)
        if choice == 0:
            return self.seed & (2**63 - 1)
        return int.from_bytes(blake2b(f"{self.seed}:{choice}".encode(), digest_size=8).digest(), "big") >> 1


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pooling"):
    """Asks for one vector of the prompt instead of tokens. The model decides how it makes the vector; so far a caller
    has nothing to choose."""


def _within(name: str, value: float | None, low: float, high: float | None, *, above: bool = False) -> None:
    """Raise InvalidRequest unless low <= value <= high; above=True leaves `low` itself out. NaN fails every bound."""
    if value is None:
        return
    fits = (value > low if above else value >= low) and (high is None or value <= high) and abs(value) != float("inf")
    if not fits:
        bounds = f"{'above' if above else 'at least'} {low}" + ("" if high is None else f" and at most {high}")
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, or one prompt to make a vector of; a request with n > 1 is submitted as n of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    """64-bit; with a token's position it fixes the token's random number."""
    emitted_ids: list[int] = []
    """Tokens generated before an engine died: they count as output, and generation goes on after them."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower goes first; preempted last."""
    tenant: str = ""
    """The tenant charged for its tokens: among requests of one priority, tenants share the engine by their weights."""
    weight: float = 1.0
    """The tenant's share, above 0."""

    @property
    def sampling(self) -> SamplingParams | None:
        """Its parameters; None where it asks for a vector."""
        return self.params if isinstance(self.params, SamplingParams) else None

    def limit(self, room: int) -> int | None:
        """The most tokens to generate, where the context has room for `room` after the prompt; 0 for a vector. None:
        the prompt is too long."""
        if self.sampling is None:
            return None if room < 0 else 0
        most = self.sampling.max_tokens
        return None if room < 1 else room if most is None else min(most, room)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token under the model's unmodified distribution, natural log."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens with their log probabilities, most likely first; as many as were asked for."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step added to a request. Exactly one with a finish_reason ends every request."""

    id: str
    new_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One per new id, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Once, when the prompt is computed: one per prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The id of stop_token_ids that ended it; None for the model's own end-of-sequence token."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    error: str | None = None
    vector: list[float] | None = None
    """What PoolingParams ask for, with the finish_reason "stop"."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges as they are now, and counters since the engine's start."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (cached ones not counted)."""
    generation_tokens: int = 0
    steps: int = 0


class SequenceSnapshot(msgspec.Struct, frozen=True):
    """One request as the scheduler sees it."""

    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache held when it was admitted."""
    computed_tokens: int
    """Tokens whose KV is in the cache, or will be after the step under way."""
    output_tokens: int
    limit: int
    """Most tokens it may generate."""
    blocks: int
    shared_blocks: int
    """Those of its pages that others hold too."""
    priority: int


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The engine between two steps, for the live view."""

    stats: EngineStats
    sequences: list[SequenceSnapshot]
    """Those that run, then those that wait, each in their order; at most engine/snapshot.py's MOST_SEQUENCES."""
    pages: bytes
    """zlib-compressed little-endian uint16, one for each page: 0 empty, 1 cached and held by nobody, 0x8000 + n shared
    by n sequences, 0x7fff held by one that is not listed, otherwise 2 + the index in `sequences` of its owner."""
    resident_bytes: int
    """Memory of the engine process; 0 where the system does not say."""
    seconds: float
    """Time it took to make this snapshot."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine reports once, when it is ready."""

    model: str
    dtype: str
    device: str
    backend: str
    """Attention backend and why it was chosen."""
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float
    arithmetic: str
    """The KV sizing in one line."""
    deterministic: bool = False
    """Whether a request's tokens depend on nothing else that runs; `quire verify` checks it."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step: what it computed, and when. Times are seconds of time.monotonic(), one clock for all processes."""

    number: int
    """The first step of an engine is 1."""
    began: float
    decided: float
    """When the scheduler had decided the batch."""
    computed: float
    """When the executor's output had arrived."""
    ended: float
    """When the scheduler had applied it."""
    rows: int
    tokens: int
    chunks: list[tuple[str, int, int]]
    """(request, first token, tokens) of the rows that are not plain decodes; each plain decode has an output."""
    preempted: list[str]
