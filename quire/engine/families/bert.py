"""BERT (Devlin et al., 2019) and the many small models of its shape, such as MiniLM."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

BERT = EncoderFamily(
    model_types=("bert",),
    defaults={"max_position_embeddings": 512},
    module="bert",
    is_bert_like=True,
)
