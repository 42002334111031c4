"""Tiny random encoders of every family, saved by transformers, as a reference for Quire's embeddings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from tests.made_once import made_once
from tests.tiny_models import VOCAB

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes a second

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 320,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
DISTIL = {"dim": 64, "hidden_dim": 160, "n_layers": 4, "n_heads": 4}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert"},
    "bert-relu": {"model_type": "bert", "hidden_act": "relu"},
    "bert-silu": {"model_type": "bert", "hidden_act": "silu"},
    "bert-tanh": {"model_type": "bert", "hidden_act": "gelu_new"},
    "distilbert": {"model_type": "distilbert", **DISTIL},
    "modernbert": {"model_type": "modernbert", "local_attention": 32, "classifier_pooling": "mean"},
    "mpnet": {"model_type": "mpnet", "pad_token_id": 1},
    "nomic": {"model_type": "nomic_bert"},
    "data2vec": {"model_type": "data2vec-text", "pad_token_id": 1},
    "roberta": {"model_type": "roberta", "pad_token_id": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", "pad_token_id": 1, "type_vocab_size": 1},
}


def save_tiny_encoder(path: Path, family: str, *, labels: int | None = None, **overrides: Any) -> Path:
    """Write a random model of the family to `path`, with a head for `labels` labels if given. Its weights are larger
    than usual, so that attention is not flat.
    """
    return made_once(
        path,
        partial(_save_tiny_encoder, family=family, labels=labels, **overrides),
        family,
        ENCODERS[family],
        labels,
        overrides,
    )


def _save_tiny_encoder(path: Path, family: str, labels: int | None = None, **overrides: Any) -> None:
    torch.manual_seed(4321)
    options = SHAPE | ENCODERS[family] | overrides
    if labels is not None:
        options["num_labels"] = labels
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    kind = AutoModel if labels is None else AutoModelForSequenceClassification
    model: PreTrainedModel = kind.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed" in name else 1.5 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model.save_pretrained(path)
