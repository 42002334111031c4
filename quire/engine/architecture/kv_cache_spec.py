"""What sublayers keep per sequence. Unlike vLLM's KVCacheSpec, these have no dtype and no block size: both are
arguments, because a plan compares several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HASH_BLOCK_SIZE = 16
"""Number of tokens per hash in larger blocks. A cached prefix may end at any multiple."""


class KVElementSizes(NamedTuple):
    """Bytes per element."""

    kv: int
    model: int
    head_scale: int = 0
    """Bytes of scales per quantized head and token."""


class KVCacheSpec:
    __slots__ = ()

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself included; None for all."""
        return None

    def without_window(self) -> KVCacheSpec:
        """Layers may share KV blocks if these specs are equal."""
        return self

    def bytes_per_token(self, sizes: KVElementSizes) -> int:
        """Bytes in KV blocks."""
        return 0

    def page_size_bytes(self, block_size: int, sizes: KVElementSizes) -> int:
        """Bytes of one KV block in this sublayer."""
        return block_size * self.bytes_per_token(sizes)

    def slot_bytes(self, num_draft_tokens: int, sizes: KVElementSizes) -> int:
        """Bytes outside of KV blocks. Draft tokens have their own, because they may be rejected."""
        return 0

    def max_memory_usage_bytes(
        self, num_tokens: int, block_size: int, sizes: KVElementSizes, num_draft_tokens: int = 0
    ) -> int:
        """Bytes that a sequence of `num_tokens` needs at once, with steps of one token."""
        blocks = max_blocks_in_window(self.window, 1, -(-num_tokens // block_size), block_size)
        return blocks * self.page_size_bytes(block_size, sizes) + self.slot_bytes(num_draft_tokens, sizes)


@dataclass(frozen=True, slots=True)
class AttentionSpec(KVCacheSpec):
    kv_elements: int
    """Elements of a token's keys and values together."""
    head_size: int = 0
    """Elements of one head's key; 0 only if keys and values are never quantized."""

    def bytes_per_token(self, sizes: KVElementSizes) -> int:
        scales = self.kv_elements // self.head_size * sizes.head_scale if sizes.head_scale else 0
        return self.kv_elements * sizes.kv + scales


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True, slots=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Elements are those of the latent, the rotated key, and the indexer's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int

    @property
    def window(self) -> int:
        return self.sliding_window

    def without_window(self) -> FullAttentionSpec:
        return FullAttentionSpec(self.kv_elements, self.head_size)


@dataclass(frozen=True, slots=True)
class ShortConvStateSpec(KVCacheSpec):
    """A sequence's slot holds a convolution's last columns. KV blocks hold the columns before every multiple of
    HASH_BLOCK_SIZE tokens, so that other sequences can continue there.
    """

    channels: int
    columns: int
    """Number of earlier tokens that the convolution reads for a token."""

    def bytes_per_token(self, sizes: KVElementSizes) -> int:
        """Columns are never quantized."""
        return -(-self.columns * self.channels // HASH_BLOCK_SIZE) * sizes.model

    def slot_bytes(self, num_draft_tokens: int, sizes: KVElementSizes) -> int:
        return (self.columns + num_draft_tokens) * self.channels * sizes.model


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec(KVCacheSpec):
    """vLLM's MambaSpec. A sequence's slot holds a convolution's last columns, a float32 matrix per head, and the inputs
    of draft tokens until they are accepted. This state is too large for KV blocks, so a cached prefix needs a snapshot.
    """

    channels: int
    columns: int
    heads: int
    key: int
    value: int
    extra_draft_values: int
    """Elements stored for a draft token in addition to its column."""

    def slot_bytes(self, num_draft_tokens: int, sizes: KVElementSizes) -> int:
        drafts = num_draft_tokens * (self.channels + self.extra_draft_values)
        matrices = self.heads * self.key * self.value * 4
        return ((self.columns + num_draft_tokens) * self.channels + drafts) * sizes.model + matrices


@dataclass(frozen=True, slots=True)
class SharedKVSpec(KVCacheSpec):
    """The sublayer reads another layer's keys and values."""

    layer: int
    sliding_window: int | None

    @property
    def window(self) -> int | None:
        return self.sliding_window


LayerKVCacheSpecs = tuple[KVCacheSpec, ...]


def attention_kv_cache_spec(kv_elements: int, head_size: int = 0, window: int | None = None) -> AttentionSpec:
    if window is None:
        return FullAttentionSpec(kv_elements, head_size)
    return SlidingWindowSpec(kv_elements, head_size, sliding_window=window)


def max_blocks_in_window(window: int | None, max_chunk_tokens: int, num_blocks: int, block_size: int) -> int:
    """Most blocks of `num_blocks` that a sequence needs at once, with steps of up to `max_chunk_tokens`."""
    if window is None:
        return num_blocks
    return min(num_blocks, (window + max_chunk_tokens + block_size - 3) // block_size + 1)
