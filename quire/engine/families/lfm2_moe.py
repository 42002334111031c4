"""LFM2's mixtures (Liquid AI, 2025): experts behind dense layers, weighed by sigmoids."""

from __future__ import annotations

from quire.engine.families.base.config_fields import default_true_reader, field_reader
from quire.engine.families.base.moe_fields import W123_NAMES, expert_intermediate_size, moe_reader
from quire.engine.families.lfm2 import LFM2, complete_lfm2_layer_types

LFM2_MOE = LFM2.derive(
    "lfm2_moe",
    field_names={
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "num_dense_layers": "first_k_dense_replace",
    },
    defaults={**LFM2.defaults, "first_k_dense_replace": 2},
    complete=complete_lfm2_layer_types,
    experts=moe_reader(
        {
            "score_function": "sigmoid",
            "normalizer_eps": 1e-6,
            "is_normalized": default_true_reader("norm_topk_prob"),
            "scale": field_reader("routed_scaling_factor", 1.0),
        },
        size=expert_intermediate_size,
        correction=lambda config: "expert_bias" if config.raw.get("use_expert_bias") is not False else None,
        name="feed_forward",
        **W123_NAMES,
    ),
)
