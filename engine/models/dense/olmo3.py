"""OLMo 3 (OLMo Team, 2025): OLMo 2 with sliding windows in three of four layers, whose rotations are not stretched."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.dense import olmo2
from quire.engine.models.gemma3 import with_two_ropes
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    theta = config.raw.get("rope_theta") or 500_000.0
    return with_two_ropes(olmo2.spec(config), config, full=theta, sliding=theta)
