"""DistilBERT (Sanh et al., 2019)."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

DISTILBERT = EncoderFamily(
    model_types=("distilbert",),
    field_names={
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    defaults={"max_position_embeddings": 512},
    module="distilbert",
    is_bert_like=True,
)
