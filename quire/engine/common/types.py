"""Structs that server and engine exchange."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams, Task

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCause = Literal["engine", "grammar", "constraints", "busy"]
"""busy: too much at a time. constraints: no token is left. grammar: it cannot be followed."""
DEFAULT_KEEP_SECONDS = 600.0


class Adapter(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """LoRA adapter (Hu et al., 2021)."""

    name: str
    digest: str
    folder: str
    """Must not change while a request needs it."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens that an image's features replace, or part of them."""

    start: int
    count: int
    digest: bytes
    kind: Literal["image"] = "image"
    is_bidirectional: bool = False
    """Tokens see later ones of the span, so steps must not split it."""
    offset: int = 0
    """Number of the image's features in earlier spans."""


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Resized for the model, not normalized."""

    digest: bytes
    """Hash of all fields but encoder_cost."""
    height: int
    width: int
    pixels: bytes
    """uint8 [height, width, 3], RGB."""
    original: tuple[int, int] | None = None
    """(height, width) before resizing, if features depend on it."""
    encoder_cost: int = 1
    """Counts tokens of step budgets (VisionSpec.encoder_cost)."""

    @classmethod
    def from_pixels(cls, height: int, width: int, pixels: bytes, original: tuple[int, int] | None = None) -> Image:
        size = f"{height}x{width}".encode()
        salt = b"" if original is None else b"".join(each.to_bytes(8, "little") for each in original)
        digest = blake2b(pixels, digest_size=16, person=size[:16], salt=salt).digest()
        return cls(digest, height, width, pixels, original)


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence to generate, or a prompt to pool. A request with n > 1 becomes n of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    """64 bits. Fixes the random number of each token position."""
    emitted_ids: list[int] = []
    """Output of an engine that died, which this one continues."""
    session: str = ""
    """The caller's conversation id; its blocks stay pinned."""
    keep_seconds: float = 0.0
    """0: the engine decides."""
    cache_salt: str = ""
    """Requests with the same salt share cached prefixes."""
    priority: int = 0
    """The lowest goes first, and is preempted last."""
    tenant: str = ""
    weight: float = 1.0
    """Above 0."""
    adapter: Adapter | None = None
    spans: tuple[MediaSpan, ...] = ()
    """Spans are ascending."""
    images: tuple[Image, ...] = ()
    """Each image occurs once."""

    @property
    def sampling_params(self) -> SamplingParams | None:
        """None for pooling."""
        return self.params if isinstance(self.params, SamplingParams) else None

    @property
    def task(self) -> Task:
        return "generate" if isinstance(self.params, SamplingParams) else self.params.task

    def output_token_limit(self, context_room: int) -> int | None:
        """0 for pooling; None if the prompt is too long."""
        if self.sampling_params is None:
            return None if context_room < 0 else 0
        max_tokens = self.sampling_params.max_tokens
        return None if context_room < 1 else context_room if max_tokens is None else min(max_tokens, context_room)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithm, from the model's unmodified distribution."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    """Most likely first. With logprob_token_ids: those and the sampled token, in the same order."""


MissReason = (
    Literal["evicted", "computing", "restarted", "replica", "cache_salt", "adapter", "weights", "prompt_logprobs"]
    | Literal["diverged", "rewritten"]
)


class PrefixDivergence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    num_common: int
    diverges_in: Literal["prompt", "answer"]
    common_ids: list[int]
    earlier_ids: list[int]
    prompt_ids: list[int]


class PrefixMissReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that were computed before but are not in the prefix cache."""

    tokens_by_reason: list[tuple[MissReason, int]]
    compute_seconds: float
    conversation: str
    turn: int
    own_load: bool = False
    """For evictions: would the tenant's later tokens fill the cache alone?"""
    nearest: PrefixDivergence | None = None

    @property
    def num_missed_tokens(self) -> int:
        return sum(tokens for _, tokens in self.tokens_by_reason)


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's result of a step. Every request ends with exactly one that has a finish_reason."""

    id: str
    new_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One per new id, if requested."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Sent once: one per prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """One of stop_token_ids; None for the model's own end token."""
    cached_tokens: int = 0
    error: str | None = None
    vector: bytes | None = None
    """float32, little-endian, with finish_reason "stop"."""
    cause: ErrorCause = "engine"
    prefix: PrefixMissReport | None = None
    """In the first output, if the prefix cache was searched."""


NO_IMAGES_REASON = "this model does not accept images"


class EngineInfo(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    device: str
    backend: str
    """Includes the reason for the choice."""
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float
    arithmetic: str
    deterministic: bool = False
    tasks: tuple[Task, ...] = ("generate",)
    notes: list[str] = []
    """Non-default choices, one line each."""
    quantization: str = ""
    """Readable name; "" if unquantized."""
    page_groups: int = 1
    rope_context: int | None = None
    """Context length that RoPE was chosen for, if it matters."""
    context_pages: int = 1
    """The most blocks of a full context. This and the statistics count per KV cache group, num_blocks over all
    `page_groups`.
    """
    state_bytes: int = 0
    kv_cache_dtype: str = "auto"
    """auto: `dtype`."""
    no_images: str = NO_IMAGES_REASON
    """Empty if requests may have images."""
    step_tokens: int = 0
    content: str = ""
    code: str = ""
    """Digest of the model's files and of the code that computes."""
    adaptable: dict[str, tuple[int, int]] = {}
    """(in, out) of linears that adapters may change, for transformers' classes."""
    caches_prefixes: bool = True
