"""The settings of a scheduler: the limits of a step and of a request, and the layout of the KV cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.engine.common.request_params import Task
from quire.engine.core.state_snapshots import SnapshotConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """The sliding window of each KV cache group (KVCacheGroups); a block belongs to one group."""
    long_prefill_token_threshold: int | None = None
    """Maximum tokens of one request in a step; None: as many as fit."""
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    hash_block_size: int | None = None
    """Unit in which cached prefixes are matched, in tokens; a divisor of block_size, its default."""
    whole_prompts: bool = False
    """A step computes a prompt whole or not at all, as an encoder must; no prompt may be longer than
    max_num_batched_tokens."""
    pools_all_tokens: bool = False
    """See Request."""
    tasks: Collection[Task] = ("generate", "embed", "classify")
    """What requests may ask of the model."""
    micro_batches: int = 1
    """Pipeline depth; steps in flight hold disjoint requests, except chunks of one prompt."""
    snapshots: SnapshotConfig | None = None
    """Budget of recurrent-state snapshots."""

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of one request in a step at most."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
