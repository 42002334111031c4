from __future__ import annotations

from typing import NamedTuple

from quire.engine.common.config import EngineConfig


class SpareBlockLayout(NamedTuple):
    first_spare_block: int
    spare_per_slot: int
    max_model_len: int


def num_spare_blocks_per_slot(config: EngineConfig, block_size: int) -> int:
    """These blocks for draft tokens come after the sequence's own blocks."""
    assert config.speculative_config is not None
    return 1 + -(-config.speculative_config.num_speculative_tokens // block_size)
