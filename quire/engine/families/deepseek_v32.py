"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3 with an indexer, which chooses the tokens that a query attends to."""

from __future__ import annotations

from quire.engine.families.base import indexer_reader, mla_mixers_reader
from quire.engine.families.deepseek_v3 import DEEPSEEK_V3

DEEPSEEK_V32 = DEEPSEEK_V3.derive(
    "deepseek_v32",
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 163_840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    other_layer_types=("indexed_attention",),
    mixers=mla_mixers_reader(read_indexer=indexer_reader(is_interleaved=False)),
)
