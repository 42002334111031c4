"""GTE v1.5 (Zhang et al., 2024). Files that were published with code of their own call it `new`."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

GTE = EncoderFamily(
    model_types=("gte",),
    defaults={"rope_theta": 160_000.0, "max_position_embeddings": 8192},
    module="gte",
)
NEW = EncoderFamily(
    model_types=("new",),
    module="gte",
)
