"""GLM-4.5 to 4.7 (GLM Team, 2025): a Llama with a partial rotation, and DeepSeek-V3's experts behind dense layers."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.experts import grouped_experts, in_layers
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    norm = "heads" if raw.get("use_qk_norm") else None
    base = base_spec(config).having(AttentionSpec, qk_norm=norm, qkv_bias=bool(raw.get("attention_bias")))
    return in_layers(grouped_experts(config), base, config)
