"""The spec of a decoder from the content of its config.json alone, without a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.checkpoint.families import FAMILIES, has_file
from quire.engine.checkpoint.files import parse_family_config, text_config
from quire.engine.families import family_decoder_spec


def read_family_spec(raw: Mapping[str, Any]) -> DecoderSpec | None:
    """By a family of ours, which may be that of a text part alone; None: none describes the model. Raises ModelError
    where the family does not serve it."""
    text = text_config(raw)
    if text.get("model_type") not in FAMILIES or (not has_file(raw) and text.get("kv_lora_rank")):
        return None  # transformers' classes cache keys and values that they make of latents
    content = raw if raw.get("model_type") in FAMILIES else text
    return family_decoder_spec(parse_family_config(content, "config.json"))
