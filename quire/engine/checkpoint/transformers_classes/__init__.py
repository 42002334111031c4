"""Which of transformers' classes are served. Imports neither torch nor transformers, whose imports take seconds."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_OUTER_FIELDS = ("tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype", "architectures")
"""These outer fields apply to the text model unless text_config overrides them."""

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
    """Values are "" for served model types. tests/engine/models/test_every_class.py writes class_support.toml."""
    content = tomllib.loads(Path(__file__).with_name("class_support.toml").read_text(encoding="utf-8"))
    reasons = dict.fromkeys(content["served"], "")
    return reasons | {kind: reason for reason, kinds in content["not_served"].items() for kind in kinds}


def transformers_version_tested() -> str:
    content = tomllib.loads(Path(__file__).with_name("class_support.toml").read_text(encoding="utf-8"))
    return str(content["transformers"])


def config_for_transformers_class(raw: Mapping[str, Any]) -> dict[str, Any]:
    text_config = raw.get("text_config")
    has_own_class = (
        isinstance(text_config, Mapping) and str(text_config.get("model_type")) in rejection_reasons_by_model_type()
    )
    return merge_text_config(raw) if has_own_class else dict(raw)


def merge_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    text_config = raw.get("text_config")
    if not isinstance(text_config, Mapping):
        return dict(raw)
    return {name: raw[name] for name in _OUTER_FIELDS if raw.get(name) is not None} | dict(text_config)


def first_position_id(hf_config: Mapping[str, Any]) -> int:
    """The padding id plus 1 in RoBERTa's classes, otherwise 0."""
    padding = hf_config.get("pad_token_id")
    return (
        int(padding) + 1
        if str(hf_config.get("model_type")) in _POSITIONS_AFTER_PADDING and isinstance(padding, int)
        else 0
    )


def class_rejection_reason(raw: Mapping[str, Any]) -> str | None:
    """None if tests found that transformers' class can be served."""
    if raw.get("is_encoder_decoder"):
        return "it is an encoder-decoder model, and neither half is served by itself"
    model_type = str(config_for_transformers_class(raw).get("model_type") or "")
    if model_type not in rejection_reasons_by_model_type():
        custom_code_note = "; its own code is not run" if raw.get("auto_map") else ""
        version = transformers_version_tested()
        return f"neither Quire nor a class of transformers {version} computes them{custom_code_note}"
    return (
        f"{rejection_reasons_by_model_type()[model_type]}; `transformers serve` may run it"
        if rejection_reasons_by_model_type()[model_type]
        else None
    )
