"""ModernBERT (Warner et al., 2024)."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

MODERNBERT = EncoderFamily(
    model_types=("modernbert",),
    defaults={"max_position_embeddings": 8192},
    module="modernbert",
    reads_classifier_pooling=True,
)
