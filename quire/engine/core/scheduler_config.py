from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.engine.common.request_params import Task
from quire.engine.core.kv_cache.state_snapshots import SnapshotConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...] = (None,)
    long_prefill_token_threshold: int | None = None
    """Per request and step; None if unlimited."""
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    hash_block_size: int | None = None
    """A divisor of block_size; None means block_size."""
    whole_prompts: bool = False
    """True if prompts must not be split, as encoders require."""
    pools_all_tokens: bool = False
    tasks: Collection[Task] = ("generate", "embed", "classify")
    micro_batches: int = 1
    """Number of pipeline stages. No request is in two steps in flight, except with chunks of its prompt."""
    snapshots: SnapshotConfig | None = None
    waits_for_grammar_tokens: bool = True
    """False: the forward pass of a request with a grammar is launched before the host knows its last token
    (PendingOutput.sample_tokens). This needs exactly one step in flight.
    """

    @property
    def max_chunk_tokens(self) -> int:
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
