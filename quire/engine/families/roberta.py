"""RoBERTa, XLM-RoBERTa and CamemBERT (Liu et al., 2019; Conneau et al., 2020; Martin et al., 2020)."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

ROBERTA = EncoderFamily(
    model_types=(
        "roberta",
        "xlm-roberta",
        "camembert",
    ),
    defaults={"type_vocab_size": 2, "max_position_embeddings": 512},
    module="roberta",
    is_bert_like=True,
)
