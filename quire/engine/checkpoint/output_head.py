"""Which output head a checkpoint has: one of its own, or the embedding. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import weight_names_of
from quire.engine.checkpoint.safetensors import is_pickled, tensor_places, text_tensor, weight_files
from quire.engine.errors import ModelError
from quire.engine.families import find_encoder_family

_HEADS = {"lm_head", "embed_out"}
_TABLES = {"embed_tokens", "wte", "word_embeddings", "embed_in"}
"""Last parts of the names that families have for the output head and for the embedding."""
_TIES = "tie_word_embeddings"
_CHUNK = 1 << 24
_Place = tuple[Path, str, int, int]
"""A tensor: its file, its type, and where in the file its bytes begin and end."""


def tied_as_stored(config: dict[str, Any], text: Mapping[str, Any], weights: Path) -> dict[str, Any]:
    """A config.json that ties the output head to the embedding only if the weights do, which count more, as in
    transformers (`tie_weights`). text: its text decoder's part."""
    if text.get(_TIES) is False or not weights.is_dir() or not _has_own_head(str(text.get("model_type")), weights):
        return config
    parts = {name: config[name] for name in ("text_config", "llm_config", "language_config") if config.get(name)}
    return config | {name: {**part, _TIES: False} for name, part in parts.items()} | {_TIES: False}


def _has_own_head(kind: str, folder: Path) -> bool:
    """True if the weights hold a head that differs from the embedding. An equal copy is no head of its own. False for a
    folder without weights; an error in them is reported by who loads them."""
    if find_encoder_family(kind) is not None:
        return False
    try:
        heads, tables = _stored_ends(kind, folder)
    except (ModelError, OSError):
        return False
    if not heads.keys() - {"bias"} or not tables:  # BERT's head has a bias of its own beside the embedding's matrix
        return False
    if heads.keys() != {"weight"}:  # a bias, or the codes of a quantized head
        return True
    return tables.keys() != {"weight"} or not _are_equal(heads["weight"], tables["weight"])


def _stored_ends(kind: str, folder: Path) -> tuple[dict[str, _Place], dict[str, _Place]]:
    """The tensors of the head and of the embedding, by the last part of their names. Raises ModelError."""
    heads, tables = dict[str, _Place](), dict[str, _Place]()
    weight_names = weight_names_of(kind)
    for shard in weight_files(folder):
        if not shard.is_file():
            continue
        for stored, place in tensor_places(shard).items():
            module, _, parameter = (text_tensor(stored) or "").rpartition(".")
            names = {each.rpartition(".")[2] for each in weight_names.own_modules(module)}
            found = heads if names & _HEADS else tables if names & _TABLES else None
            if found is not None and ".layers." not in module:
                found[parameter] = (shard, *place)
    return heads, tables


def _are_equal(one: _Place, other: _Place) -> bool:
    (file, dtype, begin, end), (other_file, other_dtype, other_begin, other_end) = one, other
    if is_pickled(file):  # the second tensor of one storage counts no bytes there
        return begin == end or other_begin == other_end
    if dtype != other_dtype or end - begin != other_end - other_begin:
        return False
    with file.open("rb") as first, other_file.open("rb") as second:
        first.seek(begin)
        second.seek(other_begin)
        for start in range(begin, end, _CHUNK):
            size = min(_CHUNK, end - start)
            if first.read(size) != second.read(size):
                return False
    return True
