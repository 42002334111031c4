"""Models that transformers' own classes compute: which, as far as it was tried, and what of their config.json Quire
itself reads. No torch and no transformers, for importing these takes seconds: the class reads the file again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_OUTER = ("tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype", "architectures")
"""What a config.json may say beside its text_config, and means of it."""

_BEHIND_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


@cache
def tried() -> Mapping[str, str]:
    """By model_type, of the causal language models of the transformers that was tried, why its class is not served;
    "": it is. From tried.toml, which tests/engine/models/test_every_class.py writes."""
    content = tomllib.loads(Path(__file__).with_name("tried.toml").read_text(encoding="utf-8"))
    found = dict.fromkeys(content["served"], "")
    return found | {kind: reason for reason, kinds in content["not_served"].items() for kind in kinds}


def tried_version() -> str:
    """Of transformers."""
    content = tomllib.loads(Path(__file__).with_name("tried.toml").read_text(encoding="utf-8"))
    return str(content["transformers"])


def class_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json for the class: of a model that takes images or audio too, that of its text part, where that has a
    class of its own."""
    part = raw.get("text_config")
    own = isinstance(part, Mapping) and str(part.get("model_type")) in tried()
    return text_fields(raw) if own else dict(raw)


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of the text part."""
    part = raw.get("text_config")
    if not isinstance(part, Mapping):
        return dict(raw)
    return {name: raw[name] for name in _OUTER if raw.get(name) is not None} | dict(part)


def first_position(given: Mapping[str, Any]) -> int:
    """The row of its table of positions that a sequence's first token has: RoBERTa's begins behind its padding."""
    padding = given.get("pad_token_id")
    return int(padding) + 1 if str(given.get("model_type")) in _BEHIND_PADDING and isinstance(padding, int) else 0


def class_not_served(raw: Mapping[str, Any]) -> str | None:
    """Why transformers' class does not serve such a model, as far as it was tried; None where it does."""
    if raw.get("is_encoder_decoder"):
        return "it is an encoder-decoder, of which no half is served alone"
    kind = str(class_config(raw).get("model_type") or "")
    if kind not in tried():
        own = "; its own code is not run" if raw.get("auto_map") else ""
        return f"neither a file of Quire nor a class of transformers {tried_version()} computes them{own}"
    return f"{tried()[kind]}; `transformers serve` may run it" if tried()[kind] else None
