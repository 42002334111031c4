from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import find_weight_names
from quire.engine.checkpoint.tensor_headers import find_weight_files, is_pickled, read_tensor_ranges, text_tensor_name
from quire.engine.common.errors import ModelError
from quire.engine.families import find_encoder_family
from quire.engine.families.base.schema.config_schema import TEXT_CONFIG_KEYS

_HEAD_MODULE_NAMES = {"lm_head", "embed_out"}
_EMBEDDING_MODULE_NAMES = {"embed_tokens", "wte", "word_embeddings", "embed_in"}
_TIE_FIELD = "tie_word_embeddings"
_COMPARE_CHUNK_BYTES = 1 << 24
_TensorLocation = tuple[Path, str, int, int]
"""File, dtype, first byte, and the byte after the last."""


def correct_tie_word_embeddings(
    config: dict[str, Any], text_config: Mapping[str, Any], weights: Path
) -> dict[str, Any]:
    """Corrects the field if the weights have an untied head, as transformers does (`tie_weights`)."""
    if (
        text_config.get(_TIE_FIELD) is False
        or not weights.is_dir()
        or not _has_untied_head(str(text_config.get("model_type")), weights)
    ):
        return config
    nested_configs = {name: config[name] for name in TEXT_CONFIG_KEYS if config.get(name)}
    return config | {name: {**part, _TIE_FIELD: False} for name, part in nested_configs.items()} | {_TIE_FIELD: False}


def _has_untied_head(model_type: str, folder: Path) -> bool:
    """False if the head is a copy of the embedding, or for broken weights, which the loader reports."""
    if find_encoder_family(model_type) is not None:
        return False
    try:
        heads, embeddings = _find_head_and_embedding_tensors(model_type, folder)
    except (ModelError, OSError):
        return False
    if not heads.keys() - {"bias"} or not embeddings:  # BERT's head has its own bias, but no weight
        return False
    if heads.keys() != {"weight"}:  # the head has a bias, or is quantized
        return True
    return embeddings.keys() != {"weight"} or not _have_equal_bytes(heads["weight"], embeddings["weight"])


def _find_head_and_embedding_tensors(
    model_type: str, folder: Path
) -> tuple[dict[str, _TensorLocation], dict[str, _TensorLocation]]:
    """Keyed by the last part of their names, such as weight and bias."""
    heads, embeddings = dict[str, _TensorLocation](), dict[str, _TensorLocation]()
    weight_names = find_weight_names(model_type)
    for shard in find_weight_files(folder):
        if not shard.is_file():
            continue
        for tensor_name, location in read_tensor_ranges(shard).items():
            module, _, parameter = (text_tensor_name(tensor_name) or "").rpartition(".")
            names = {each.rpartition(".")[2] for each in weight_names.modules_from_checkpoint(module)}
            tensors = heads if names & _HEAD_MODULE_NAMES else embeddings if names & _EMBEDDING_MODULE_NAMES else None
            if tensors is not None and ".layers." not in module:
                tensors[parameter] = (shard, *location)
    return heads, embeddings


def _have_equal_bytes(one: _TensorLocation, other: _TensorLocation) -> bool:
    (file, dtype, begin, end), (other_file, other_dtype, other_begin, other_end) = one, other
    if is_pickled(file):  # the second tensor of a shared storage has size 0
        return begin == end or other_begin == other_end
    if dtype != other_dtype or end - begin != other_end - other_begin:
        return False
    with file.open("rb") as first, other_file.open("rb") as second:
        first.seek(begin)
        second.seek(other_begin)
        for start in range(begin, end, _COMPARE_CHUNK_BYTES):
            size = min(_COMPARE_CHUNK_BYTES, end - start)
            if first.read(size) != second.read(size):
                return False
    return True
