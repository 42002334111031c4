"""FlexOLMo (Shi et al., 2025): OLMo 2 with experts in every layer."""

from __future__ import annotations

from quire.engine.families.base import NORMALIZED_ROUTING, moe_reader
from quire.engine.families.olmo2 import OLMO2

FLEX_OLMO = OLMO2.derive(
    "flex_olmo",
    defaults={"rope_theta": 500_000.0, "max_position_embeddings": 4096},
    experts=moe_reader(NORMALIZED_ROUTING, input_norm=False, output_norm=True),
)
