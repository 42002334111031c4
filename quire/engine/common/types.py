"""Frozen structs that flow between server and engine. For statistics see engine/core/stats.py, for steps
engine/common/scheduler_output.py.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams, Task

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCause = Literal["engine", "grammar", "constraints", "busy"]
"""busy: too much at a time; constraints: no token is left; grammar: it cannot be followed."""
DEFAULT_KEEP_SECONDS = 600.0
"""How long blocks stay pinned for a conversation's next turn."""


class Adapter(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """A LoRA adapter (Hu et al., 2021)."""

    name: str
    digest: str
    """Hash of the content."""
    folder: str
    """Its files must not change while a request needs them."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens in whose place the model reads features of an image, or of part of one. `digest` identifies the
    image.
    """

    start: int
    """Index of its first token in the prompt."""
    count: int
    digest: bytes
    kind: Literal["image"] = "image"
    is_bidirectional: bool = False
    """Its tokens also see later ones of the span, so no step may end within it."""
    offset: int = 0
    """Number of the content's features in earlier spans."""


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Content of a span, resized for the model, not yet normalized."""

    digest: bytes
    """Hash of all other fields but encoder_cost."""
    height: int
    width: int
    pixels: bytes
    """uint8 [height, width, 3], RGB."""
    original: tuple[int, int] | None = None
    """Height and width before resizing, if the number of features depends on them."""
    encoder_cost: int = 1
    """Tokens of step budgets that encoding it takes: VisionSpec.encoder_cost."""

    @classmethod
    def from_pixels(cls, height: int, width: int, pixels: bytes, original: tuple[int, int] | None = None) -> Image:
        size = f"{height}x{width}".encode()
        salt = b"" if original is None else b"".join(each.to_bytes(8, "little") for each in original)
        digest = blake2b(pixels, digest_size=16, person=size[:16], salt=salt).digest()
        return cls(digest, height, width, pixels, original)


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate, or one prompt to pool. A request with n > 1 is submitted as n of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    """64-bit; with a token's position it fixes the token's random number."""
    emitted_ids: list[int] = []
    """Output tokens from before an engine died; generation continues after them."""
    session: str = ""
    """Caller's name of the conversation; blocks are pinned for its next turn."""
    keep_seconds: float = 0.0
    """How long blocks are pinned; 0: the engine decides."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Lower goes first, and is preempted last."""
    tenant: str = ""
    """Is charged for the tokens: within a priority, tenants share the engine by weight."""
    weight: float = 1.0
    """The tenant's share, above 0."""
    adapter: Adapter | None = None
    spans: tuple[MediaSpan, ...] = ()
    """In order, not overlapping."""
    images: tuple[Image, ...] = ()
    """Content of each span, once."""

    @property
    def encoder_inputs(self) -> tuple[tuple[MediaSpan, ...], tuple[Image, ...], str]:
        """Inputs of the encoder cache, which the salt separates."""
        return self.spans, self.images, self.cache_salt

    @property
    def sampling_params(self) -> SamplingParams | None:
        """None for pooling."""
        return self.params if isinstance(self.params, SamplingParams) else None

    @property
    def task(self) -> Task:
        return "generate" if isinstance(self.params, SamplingParams) else self.params.task

    def output_token_limit(self, context_room: int) -> int | None:
        """Most tokens to generate, if the context has room for `context_room` after the prompt; 0 for pooling; None:
        the prompt is too long.
        """
        if self.sampling_params is None:
            return None if context_room < 0 else 0
        max_tokens = self.sampling_params.max_tokens
        return None if context_room < 1 else context_room if max_tokens is None else min(max_tokens, context_room)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of a token, from the model's unmodified distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The requested number of most likely tokens with log probabilities, most likely first. With logprob_token_ids:
    those and the sampled one, in the same order.
    """


MissReason = (
    Literal["evicted", "computing", "restarted", "replica", "cache_salt", "adapter", "weights", "prompt_logprobs"]
    | Literal["diverged", "rewritten"]
)
"""Why tokens computed before were not found in the prefix cache: engine/prefix_misses/miss_tracker.py."""


class PrefixDivergence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First divergence of a prompt from the tenant's closest earlier sequence."""

    num_common: int
    """Length of the common prefix."""
    diverges_in: Literal["prompt", "answer"]
    """Part of the earlier request."""
    common_ids: list[int]
    """Last tokens of the common prefix."""
    earlier_ids: list[int]
    """The earlier sequence's tokens from there."""
    prompt_ids: list[int]
    """The prompt's tokens from there."""


class PrefixMissReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that a prompt could have found in the prefix cache, but did not."""

    tokens_by_reason: list[tuple[MissReason, int]]
    """Most tokens first."""
    compute_seconds: float
    """Time to compute them, as their share of the prompt's steps."""
    conversation: str
    """Id of the conversation's first request."""
    turn: int
    """Number within the conversation, from 1."""
    own_load: bool = False
    """True if what the tenant had computed since would have filled the cache alone, for evictions."""
    nearest: PrefixDivergence | None = None

    @property
    def num_missed_tokens(self) -> int:
        return sum(tokens for _, tokens in self.tokens_by_reason)


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step added to a request. Exactly one with a finish_reason ends every request."""

    id: str
    new_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One per new id, if requested."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Once, when the prompt is computed: one per prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """Id of stop_token_ids that ended it; None for the model's own end token."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache."""
    error: str | None = None
    vector: bytes | None = None
    """Result of pooling, with finish_reason "stop": float32, little-endian."""
    cause: ErrorCause = "engine"
    prefix: PrefixMissReport | None = None
    """With the first output, if the prefix cache was searched."""


NO_IMAGES_REASON = "this model reads no images"


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine reports once it is ready."""

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
    """A request's tokens depend on nothing else that runs; `quire verify` checks it."""
    tasks: tuple[Task, ...] = ("generate",)
    notes: list[str] = []
    """Notes on non-default choices, one line each."""
    quantization: str = ""
    """Weight quantization as text; "": none."""
    page_groups: int = 1
    rope_context: int | None = None
    """Context in tokens for which RoPE was chosen; None: RoPE does not depend on it."""
    context_pages: int = 1
    """Most blocks of a full context. This and stats count per KV cache group; num_blocks counts over all `page_groups`.
    """
    state_bytes: int = 0
    """Size of recurrent state in all slots, which KV blocks do not include."""
    kv_cache_dtype: str = "auto"
    """The setting's name of the dtype; auto: `dtype`."""
    no_images: str = NO_IMAGES_REASON
    """Why requests may not contain images; "" if they may."""
    step_tokens: int = 0
    content: str = ""
    code: str = ""
    """Digests of the model's files, wherever they are (see model_sample_digest), and of the code that computes."""
    adaptable: dict[str, tuple[int, int]] = {}
    """(in, out) of linears that may have adapters, for transformers' classes; {}: see lora/target_modules.py."""
