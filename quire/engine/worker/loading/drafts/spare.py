"""Pages of what drafts, behind those that sequences own."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.config import EngineConfig


class SparePages(NamedTuple):
    """As DraftPages of engine/drafting/model.py has them."""

    first_spare: int
    spare: int
    max_model_len: int


def spare_pages(config: EngineConfig, block_size: int) -> int:
    """Of each slot, for drafts beyond the pages of its sequence."""
    assert config.speculative_config is not None
    return 1 + -(-config.speculative_config.num_speculative_tokens // block_size)
