"""Phi-3 and Phi-4 (Abdin et al., 2024): a Llama whose long contexts have LongRoPE, in a part of each head."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, rope = config.raw, dict(config.rope)
    if rope["rope_type"] in ("longrope", "su", "yarn"):  # older names
        old = rope.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or 4096
        trained = raw.get("max_position_embeddings") or config.max_position
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": old}
        rope |= {
            "max_position_embeddings": config.context or config.max_position,
            "factor": rope.get("factor") or trained / old,
        }
    return base_spec(config).having(AttentionSpec, rope=rope, window=raw.get("sliding_window") or None)
