"""dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek-V3's experts behind dense layers."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models import qwen3
from quire.engine.models.experts import grouped_experts, in_layers
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return in_layers(grouped_experts(config), qwen3.spec(config), config)
