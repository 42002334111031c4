"""Finds a model's files, and reads config.json, generation_config.json and the headers of safetensors files.

It imports neither torch nor transformers, because importing those takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.engine.errors import ModelError

_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""The files of a hub repository that are downloaded."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per number of the safetensors types that the loader casts to the served type."""
_GEMMA3_DEFAULTS = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_GEMMA3_DEFAULTS |= {"max_position_embeddings": 131_072}
"""What the config.json of Gemma 3 models leaves out: transformers' defaults."""
_SAMPLING_PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The keys of generation_config.json that become a model's default sampling parameters."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, read from config.json.

    Keys that only one model family has stay in `raw`, where that family's module reads them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    dtype: str
    """The checkpoint's type; "float32" if config.json names none."""
    rope: dict[str, Any]
    """rope_type, rope_theta, and the keys that the rope_type adds to them."""
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any]


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The directory of a model.

    name: a local directory, or a hub id, which is downloaded if it is not in the hub's cache. Raises ModelError.
    """
    path = Path(name).expanduser()
    if path.is_file():
        raise ModelError(f"model: {name!r} is a file; give a directory of safetensors (GGUF is not read)")
    return path if path.is_dir() else _download(name, revision, _WANTED_FILES)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    """The local directory of a hub id's snapshot, with the files that match these patterns. Raises ModelError."""
    if Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"model: there is no directory {name!r}, and it is not a hub id (owner/name)")
    # Imported here, because importing the hub's client takes a third of a second and a local directory needs none.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ModelError(f"model: {name!r} is neither a directory nor found on the hub") from error
    except OSError as error:
        raise ModelError(f"model: {name!r} is not a directory, and the hub cannot be reached to download it") from error


def read_raw_config(name: str, revision: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """The content of a config.json, and the directory of the model that it belongs to.

    name: a directory, a .json file, or a hub id. Of a hub id only config.json is downloaded, so the directory is None.
    Raises ModelError.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json":
        file, folder = path, path.parent
    elif path.is_dir():
        file, folder = path / "config.json", path
    else:
        file, folder = _download(name, revision, ["config.json"]) / "config.json", None
    raw = _read_json(file)
    if raw is None:
        raise ModelError(f"model: there is no {file.name} in {file.absolute().parent.name}")
    return raw, folder


def read_model_config(path: Path) -> ModelConfig:
    """Read the config.json, in transformers' format, of a model directory. Raises ModelError, naming a missing key."""
    raw = _read_json(path / "config.json")
    if raw is None:
        raise ModelError(f"model: {path.name} has no config.json")
    if quantized := raw.get("quantization_config"):
        method = dict(quantized).get("quant_method", "in some way")
        raise ModelError(f"model: its weights are quantized ({method}), which is not served yet")
    if raw.get("model_type") == "gemma3":  # the only family with image input whose text part can be served
        raw = text_config(raw)
    generation = _read_json(path / "generation_config.json") or {}
    heads = _integer(raw, "num_attention_heads")
    hidden = _integer(raw, "hidden_size")
    return ModelConfig(
        model_type=str(raw.get("model_type", "")),
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_position=int(raw.get("max_position_embeddings") or 2048),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        rope=_rope(raw),
        eos_token_ids=_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        raw=raw,
    )


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model's text decoder.

    If a model also takes images or audio, it is an object inside config.json. The keys of that object then override
    the outer keys of the same name.
    """
    part = raw.get("text_config") or raw.get("llm_config") or raw.get("language_config")
    text = {**raw, **(part if isinstance(part, Mapping) else {})}
    return _GEMMA3_DEFAULTS | text if text.get("model_type") == "gemma3_text" else text


def text_tensor(name: str) -> str | None:
    """The name of a checkpoint's tensor in a text-only model; None if it belongs to the image encoder."""
    if "vision_tower." in name or "multi_modal_projector." in name:
        return None
    return name.replace("language_model.", "")


def weight_files(path: Path) -> list[Path]:
    """The paths of a model's safetensors files: model.safetensors, or the shards that the index file names.

    They need not exist. Raises ModelError when the index file is invalid.
    """
    index = _read_json(path / "model.safetensors.index.json")
    if index is None:
        return [path / "model.safetensors"]
    try:
        return [path / name for name in sorted(set(index["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelError("model: model.safetensors.index.json has no weight_map") from error


class StoredWeights(NamedTuple):
    """The size of a checkpoint's weights."""

    floats: int
    """How many numbers of 16 bits or more; they are loaded in the served type."""
    other_bytes: int
    """Bytes of packed integers and 8-bit floats, which are loaded as they are."""


def read_stored_weights(path: Path) -> StoredWeights | None:
    """Add up the tensors in the headers, a few KB each, of a model's safetensors files; None if a file is missing."""
    shards = weight_files(path)
    if not all(shard.is_file() for shard in shards):
        return None
    floats = other = 0
    for shard in shards:
        for name, tensor in _safetensors_header(shard).items():
            if name == "__metadata__" or name.endswith("rotary_emb.inv_freq") or text_tensor(name) is None:
                continue
            begin, end = tensor["data_offsets"]
            if tensor["dtype"] in _FLOAT_BYTES:
                floats += (end - begin) // _FLOAT_BYTES[tensor["dtype"]]
            else:
                other += end - begin
    return StoredWeights(floats, other)


def _safetensors_header(shard: Path) -> dict[str, Any]:
    """The header: its length as eight bytes, little-endian, then JSON (https://huggingface.co/docs/safetensors)."""
    try:
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"model: {shard.name} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"model: {shard.name} has no safetensors header")
    return header


def read_generation_defaults(path: Path) -> dict[str, float]:
    """The sampling parameters that generation_config.json recommends; {} if it says that nothing is sampled."""
    generation = _read_json(path / "generation_config.json") or {}
    if generation.get("do_sample") is False:
        return {}
    return {key: generation[key] for key in _SAMPLING_PARAMETERS if generation.get(key) is not None}


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file. Raises ModelError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {path.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model: {path.name} does not hold a JSON object")
    return content


def _integer(raw: dict[str, Any], key: str) -> int:
    """An integer that config.json must have. Raises ModelError, naming the key."""
    value = raw.get(key)
    if not isinstance(value, int):
        family = f"config.json of a {raw.get('model_type')!r}"
        raise ModelError(f"model: {family} lacks {key}, needed to build a decoder")
    return value


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters, as one object with both rope_theta and rope_type.

    Files of transformers 4 have rope_theta beside an object rope_scaling, those of transformers 5 both in
    rope_parameters.
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return rope


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """All ids among `values`, each of which is one id, several or none; in order and without repetition."""
    found: list[int] = []
    for value in values:
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))
