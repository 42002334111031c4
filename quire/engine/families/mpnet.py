"""MPNet (Song et al., 2020)."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

MPNET = EncoderFamily(
    model_types=("mpnet",),
    defaults={"max_position_embeddings": 512},
    module="mpnet",
    is_bert_like=True,
)
