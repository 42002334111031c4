"""What flows between server and engine: requests, outputs, and what the engine is. All frozen structs.

What it does is told in engine/core/stats.py; what a step is made of is in engine/common/scheduler_output.py.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams, Task

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCause = Literal["engine", "grammar", "constraints", "busy"]
"""Of an error: the engine; a grammar that cannot be followed; constraints that leave no token; too much at a time."""
DEFAULT_KEEP_SECONDS = 600.0
"""How long pages are kept for a conversation's next turn where nothing else is said."""


class Adapter(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A low-rank adapter (LoRA: Hu et al., 2021) beside the model."""

    name: str
    digest: str
    """Of its content: what differs in anything has another."""
    folder: str
    """Where its files are; they stay as they are as long as a request needs them."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a prompt in whose place the model reads features: of an image, or of a part of one."""

    start: int
    """The place of the first of them among the prompt's tokens."""
    count: int
    digest: bytes
    """Of the content that the features are made of; another content has another."""
    kind: Literal["image"] = "image"
    is_bidirectional: bool = False
    """Whether its tokens see each other, those behind them too: no step may end within it."""
    offset: int = 0
    """The features of so many of the content's tokens stand in spans before it."""


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a span's features are made of, resized as the model reads it, not yet normalised."""

    digest: bytes
    """Of all that follows, but the work."""
    height: int
    width: int
    pixels: bytes
    """uint8 [height, width, 3], RGB."""
    original: tuple[int, int] | None = None
    """Height and width before it was resized, where the number of features depends on them."""
    encoder_cost: int = 1
    """What reading it takes of steps' budgets, in tokens: VisionSpec.encoder_cost of the model's."""

    @classmethod
    def from_pixels(cls, height: int, width: int, pixels: bytes, original: tuple[int, int] | None = None) -> Image:
        size = f"{height}x{width}".encode()
        salt = b"" if original is None else b"".join(each.to_bytes(8, "little") for each in original)
        digest = blake2b(pixels, digest_size=16, person=size[:16], salt=salt).digest()
        return cls(digest, height, width, pixels, original)


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, or one prompt to make a vector of; a request with n > 1 is submitted as n of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    """64-bit; with a token's position it fixes the token's random number."""
    emitted_ids: list[int] = []
    """Tokens generated before an engine died: they count as output, and generation goes on after them."""
    session: str = ""
    """The conversation that it is a turn of, by a name that its caller chose: pages are kept for the next turn."""
    keep_seconds: float = 0.0
    """For how long; 0: as long as the engine thinks right."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower goes first; preempted last."""
    tenant: str = ""
    """The tenant charged for its tokens: among requests of one priority, tenants share the engine by their weights."""
    weight: float = 1.0
    """The tenant's share, above 0."""
    adapter: Adapter | None = None
    spans: tuple[MediaSpan, ...] = ()
    """In the order of their places; they do not overlap."""
    images: tuple[Image, ...] = ()
    """The content of each span, once."""

    @property
    def encoder_inputs(self) -> tuple[tuple[MediaSpan, ...], tuple[Image, ...], str]:
        """What the device needs to make its spans' features; those of other salts are made anew."""
        return self.spans, self.images, self.cache_salt

    @property
    def sampling_params(self) -> SamplingParams | None:
        """Its parameters; None where it asks for a vector."""
        return self.params if isinstance(self.params, SamplingParams) else None

    @property
    def task(self) -> Task:
        return "generate" if isinstance(self.params, SamplingParams) else self.params.task

    def output_token_limit(self, context_room: int) -> int | None:
        """The most tokens to generate, where the context has room for `context_room` after the prompt; 0 for a vector.
        None: the prompt is too long."""
        if self.sampling_params is None:
            return None if context_room < 0 else 0
        max_tokens = self.sampling_params.max_tokens
        return None if context_room < 1 else context_room if max_tokens is None else min(max_tokens, context_room)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one token under the model's unmodified distribution, natural log."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens with their log probabilities, most likely first; as many as were asked for. With
    logprob_token_ids those and the picked one, in the same order."""


MissReason = (
    Literal["evicted", "computing", "restarted", "replica", "cache_salt", "adapter", "weights", "prompt_logprobs"]
    | Literal["diverged", "rewritten"]
)
"""Why tokens that were computed before were not found in the prefix cache: engine/prefix_misses/miss_tracker.py."""


class PrefixDivergence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a prompt goes on otherwise than the nearest earlier sequence of its tenant."""

    num_common: int
    """Tokens that both begin with."""
    diverges_in: Literal["prompt", "answer"]
    """In what of the earlier request they differ."""
    common_ids: list[int]
    """The last tokens that both have."""
    earlier_ids: list[int]
    """The earlier sequence's tokens from there."""
    prompt_ids: list[int]
    """The prompt's."""


class PrefixMissReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a prompt could have found in the prefix cache, and did not."""

    tokens_by_reason: list[tuple[MissReason, int]]
    """Tokens by reason, the most first."""
    compute_seconds: float
    """What computing these took, as their share of the steps that computed the prompt."""
    conversation: str
    """The id of the request with which its conversation began."""
    turn: int
    """Its number in that, from 1."""
    own_load: bool = False
    """Whether what its tenant had computed since would have filled the cache alone, where something was evicted."""
    nearest: PrefixDivergence | None = None

    @property
    def num_missed_tokens(self) -> int:
        return sum(tokens for _, tokens in self.tokens_by_reason)


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    vector: bytes | None = None
    """What PoolingParams ask for, with the finish_reason "stop": float32, little-endian."""
    cause: ErrorCause = "engine"
    """Of the error."""
    prefix: PrefixMissReport | None = None
    """With the first output, where the prefix cache was asked."""


NO_IMAGES_REASON = "this model reads no images"
"""Why a request may not bring images, where the model is made for none."""


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
    deterministic: bool = False
    """Whether a request's tokens depend on nothing else that runs; `quire verify` checks it."""
    tasks: tuple[Task, ...] = ("generate",)
    """What requests may ask of the model."""
    notes: list[str] = []
    """What was chosen otherwise than one might expect, a line each."""
    quantization: str = ""
    """How the weights are stored in few bits, for people to read; "" where they are not."""
    page_groups: int = 1
    rope_context: int | None = None
    """Tokens of the context for which rotations were chosen; None: they depend on none."""
    context_pages: int = 1
    """Most pages of a full context. It and stats count those of each of the `page_groups`, num_blocks those of all."""
    state_bytes: int = 0
    """Of what layers keep of sequences beside pages, in every slot."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in, by the setting's names; auto: `dtype`."""
    no_images: str = NO_IMAGES_REASON
    """Why requests may not bring images; "" where they may."""
    step_tokens: int = 0
    """Most tokens in one step."""
    content: str = ""
    code: str = ""
    """Digests of the model's files, wherever they lie (see model_sample_digest), and of the code that computes."""
    adaptable: dict[str, tuple[int, int]] = {}
    """(in, out) of linears that may have adapters, where transformers' class has them; {}: as lora/target_modules.py
    says."""
