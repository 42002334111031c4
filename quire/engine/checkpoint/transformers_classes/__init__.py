"""Models that transformers' own classes compute: which, as far as it was tried, and what of their config.json Quire
itself reads. No torch and no transformers, for importing these takes seconds: the class reads the file again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_OUTER_FIELDS = ("tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype", "architectures")
"""What a config.json may say beside its text_config, and means of it."""

_POSITIONS_AFTER_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


@cache
def rejection_reasons_by_model_type() -> Mapping[str, str]:
    """By model_type, of the causal language models of the transformers that was tried, why its class is not served;
    "": it is. From class_support.toml, which tests/engine/models/test_every_class.py writes."""
    content = tomllib.loads(Path(__file__).with_name("class_support.toml").read_text(encoding="utf-8"))
    reasons = dict.fromkeys(content["served"], "")
    return reasons | {kind: reason for reason, kinds in content["not_served"].items() for kind in kinds}


def transformers_version_tested() -> str:
    """Of transformers."""
    content = tomllib.loads(Path(__file__).with_name("class_support.toml").read_text(encoding="utf-8"))
    return str(content["transformers"])


def config_for_transformers_class(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json for the class: of a model that takes images or audio too, that of its text part, where that has a
    class of its own."""
    text_config = raw.get("text_config")
    has_own_class = (
        isinstance(text_config, Mapping) and str(text_config.get("model_type")) in rejection_reasons_by_model_type()
    )
    return merge_text_config(raw) if has_own_class else dict(raw)


def merge_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the text part."""
    text_config = raw.get("text_config")
    if not isinstance(text_config, Mapping):
        return dict(raw)
    return {name: raw[name] for name in _OUTER_FIELDS if raw.get(name) is not None} | dict(text_config)


def first_position_id(hf_config: Mapping[str, Any]) -> int:
    """The row of its table of positions that a sequence's first token has: RoBERTa's begins behind its padding."""
    padding = hf_config.get("pad_token_id")
    return (
        int(padding) + 1
        if str(hf_config.get("model_type")) in _POSITIONS_AFTER_PADDING and isinstance(padding, int)
        else 0
    )


def class_rejection_reason(raw: Mapping[str, Any]) -> str | None:
    """Why transformers' class does not serve such a model, as far as it was tried; None where it does."""
    if raw.get("is_encoder_decoder"):
        return "it is an encoder-decoder, of which no half is served alone"
    model_type = str(config_for_transformers_class(raw).get("model_type") or "")
    if model_type not in rejection_reasons_by_model_type():
        custom_code_note = "; its own code is not run" if raw.get("auto_map") else ""
        version = transformers_version_tested()
        return f"neither a file of Quire nor a class of transformers {version} computes them{custom_code_note}"
    return (
        f"{rejection_reasons_by_model_type()[model_type]}; `transformers serve` may run it"
        if rejection_reasons_by_model_type()[model_type]
        else None
    )
