"""MiniCPM 3 (OpenBMB, 2024): non-interleaved RoPE, and multipliers of embeddings, residuals and logits."""

from __future__ import annotations

from quire.engine.architecture import NormSpec
from quire.engine.families.base import DecoderFamily, ModelConfig, mla_mixers_reader


def _residual_multiplier(config: ModelConfig) -> float:
    return (config.raw.get("scale_depth") or config.num_layers**0.5) / config.num_layers**0.5


MINICPM3 = DecoderFamily(
    model_types=("minicpm3",),
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "max_position_embeddings": 32768,
    },
    missing_defaults={"q_lora_rank": 768},
    norm=lambda config: NormSpec(config.norm_eps / _residual_multiplier(config) ** 2),
    mixers=mla_mixers_reader(is_interleaved=lambda config: False),
    decoder={
        "embedding_scale": lambda config: (config.raw.get("scale_emb") or 12.0) / _residual_multiplier(config),
        "residual_multiplier": _residual_multiplier,
        "logit_scale": lambda config: (config.raw.get("dim_model_base") or config.hidden_size) / config.hidden_size,
    },
)
