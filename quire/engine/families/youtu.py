"""Youtu-LLM (Tencent, 2026): DeepSeek-V3's attention with an MLP in every layer."""

from __future__ import annotations

from quire.engine.families.base.config_fields import default_true_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.mla_fields import mla_mixers_reader

YOUTU = Family(
    model_types=("youtu",),
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"q_lora_rank": 1536},
    mixers=mla_mixers_reader(is_interleaved=default_true_reader("rope_interleave")),
)
