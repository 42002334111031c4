"""Mellum 2 (JetBrains, 2026): Qwen3's experts, with windows, and rotations of layers without one that are their own."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.gemma3 import with_two_ropes
from quire.engine.models.sparse import qwen3_moe
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return with_two_ropes(qwen3_moe.spec(config), config, full=500_000.0, sliding=10_000.0)
