"""Nomic Embed (Nussbaum et al., 2024)."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

NOMIC_BERT = EncoderFamily(
    model_types=("nomic_bert",),
    field_names={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    defaults={"type_vocab_size": 2},
    module="nomic_bert",
)
