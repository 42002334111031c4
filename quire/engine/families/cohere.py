"""Command R (Cohere, 2024): LayerNorms without a bias, rotations of neighbours, scaled logits."""

from __future__ import annotations

from quire.engine.errors import ModelError
from quire.engine.families.base.config_fields import attention_bias_readers
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_norms import PARALLEL_MLP, layer_norm_reader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.weight_names import WeightNames


def _logit_scale(config: ModelConfig) -> float:
    if isinstance(scale := config.raw.get("logit_scale"), str):
        raise ModelError(f"model: config.json: logit_scale: expected float, got {scale!r}")
    return 1.0 if scale is None else scale


COHERE = Family(
    model_types=("cohere",),
    field_names={"layer_norm_eps": "rms_norm_eps"},
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
    },
    norm=layer_norm_reader(bias=False),
    attention={
        "qk_norm": lambda config: "centred" if config.raw.get("use_qk_norm") else None,
        **attention_bias_readers("attention_bias"),
    },
    mlp=PARALLEL_MLP,
    decoder={"logit_scale": _logit_scale},
    weight_names=WeightNames(interleaved_rope=True),
)
