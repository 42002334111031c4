"""Structs that the server and the engine exchange."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams, Task

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCause = Literal["engine", "grammar", "constraints", "busy"]
""""busy": too much work now. "constraints": no token is left to sample. "grammar": the grammar cannot be followed."""
DEFAULT_KEEP_SECONDS = 600.0


class Adapter(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """LoRA adapter (Hu et al., 2021)."""

    name: str
    digest: str
    folder: str
    """The adapter's files, which must not change while a request needs them."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens that an image's features replace, or a contiguous part of them."""

    start: int
    count: int
    digest: bytes
    kind: Literal["image"] = "image"
    is_bidirectional: bool = False
    """True if each token attends to later tokens of the span, so that steps must not split the span."""
    offset: int = 0
    """Number of the image's features that belong to earlier spans."""


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that was resized for the model, but not normalized."""

    digest: bytes
    """Hash of all fields except encoder_cost."""
    height: int
    width: int
    pixels: bytes
    """uint8 [height, width, 3], RGB."""
    original: tuple[int, int] | None = None
    """(height, width) before resizing, if the image's features depend on it."""
    encoder_cost: int = 1
    """Cost in tokens of a step's budget."""

    @classmethod
    def from_pixels(cls, height: int, width: int, pixels: bytes, original: tuple[int, int] | None = None) -> Image:
        size = f"{height}x{width}".encode()
        salt = b"" if original is None else b"".join(each.to_bytes(8, "little") for each in original)
        digest = blake2b(pixels, digest_size=16, person=size[:16], salt=salt).digest()
        return cls(digest, height, width, pixels, original)


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence to generate, or a prompt to pool. An API request with n > 1 becomes n of these."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams | PoolingParams
    seed: int
    """64 bits. The seed determines the random number of each token position."""
    emitted_ids: list[int] = []
    """Tokens that an earlier engine computed before it ended, and that this engine continues."""
    session: str = ""
    """The caller's conversation id."""
    keep_seconds: float = 0.0
    """Seconds for which blocks stay pinned; 0 lets the engine decide."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    priority: int = 0
    """Requests with the lowest number are scheduled first and preempted last."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's weight in fair scheduling, above 0."""
    adapter: Adapter | None = None
    spans: tuple[MediaSpan, ...] = ()
    """In the order of their positions."""
    images: tuple[Image, ...] = ()
    """All images of `spans`, each one once."""

    @property
    def sampling_params(self) -> SamplingParams | None:
        return self.params if isinstance(self.params, SamplingParams) else None

    @property
    def task(self) -> Task:
        return "generate" if isinstance(self.params, SamplingParams) else self.params.task

    def output_token_limit(self, context_room: int) -> int | None:
        """0 for pooling, None if the prompt is too long. `context_room`: the context's tokens after the prompt."""
        if self.sampling_params is None:
            return None if context_room < 0 else 0
        max_tokens = self.sampling_params.max_tokens
        return None if context_room < 1 else context_room if max_tokens is None else min(max_tokens, context_room)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithm of a token's probability in the model's unmodified distribution."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    """(token id, log probability), most likely first. With logprob_token_ids: those and the sampled token, in this
    order.
    """


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
    """Prompt tokens that were computed earlier but were not found in the prefix cache."""

    tokens_by_reason: list[tuple[MissReason, int]]
    compute_seconds: float
    conversation: str
    turn: int
    own_load: bool = False
    """True if tokens were evicted, and the tenant's own later tokens alone would have filled the cache."""
    nearest: PrefixDivergence | None = None

    @property
    def num_missed_tokens(self) -> int:
        return sum(tokens for _, tokens in self.tokens_by_reason)


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's result of a step. Each request has exactly one output with a finish_reason, its last."""

    id: str
    new_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One for each new id, if requested."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token, None for the first. All are in one output."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The token of stop_token_ids that ended the answer; None if anything else did."""
    cached_tokens: int = 0
    error: str | None = None
    vector: bytes | None = None
    """A pooling request's vector, float32, little-endian. finish_reason is then "stop"."""
    cause: ErrorCause = "engine"
    prefix: PrefixMissReport | None = None
    """Set in the first output, if the prefix cache was searched."""


NO_IMAGES_REASON = "this model does not accept images"


class EngineInfo(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    device: str
    backend: str
    """Name of the attention backend, and why it was chosen."""
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
    """Choices that differ from the defaults, one line each."""
    quantization: str = ""
    """Readable name; "" if the weights are not quantized."""
    page_groups: int = 1
    rope_context: int | None = None
    """Context length for which RoPE frequencies were chosen; None if they do not depend on it."""
    context_pages: int = 1
    """Maximum number of blocks of a full context. This number and the statistics count a block of each KV cache group
    separately, whereas `num_blocks` counts one for all `page_groups` together.
    """
    state_bytes: int = 0
    kv_cache_dtype: str = "auto"
    """"auto" means `dtype`."""
    no_images: str = NO_IMAGES_REASON
    """Why requests must not have images; "" if they may."""
    step_tokens: int = 0
    content: str = ""
    code: str = ""
    """Digest of the model's files and of the code that computes the model."""
    adaptable: dict[str, tuple[int, int]] = {}
    """(in_features, out_features) of the linears that adapters may change, for transformers' classes."""
    caches_prefixes: bool = True
