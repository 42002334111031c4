"""Finds a model's files, and reads config.json and generation_config.json.

It imports neither torch nor transformers, because importing those takes seconds.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.adapted import class_config, first_position, text_fields
from quire.engine.checkpoint.catalog import known_models, nearest_models
from quire.engine.checkpoint.config_reader import (
    checked_text_config,
    errors_named_as_in_file,
    family_not_served,
    names_in_file,
    parse_family_config,
    stored_dtype,
    uses_transformers_class,
    why_not_served,
)
from quire.engine.checkpoint.download import download, download_some, fetch_config, is_cached
from quire.engine.checkpoint.names import HubName, hub_name
from quire.engine.checkpoint.output_head import tied_as_stored
from quire.engine.checkpoint.quantization import weight_formats
from quire.engine.config import EngineConfig
from quire.engine.errors import ModelError
from quire.engine.families import find_multimodal_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import (
    ALIASES,
    AdaptedFields,
    GenerationFields,
    PlannedFields,
)
from quire.engine.folder_reader import convert_parsed_json
from quire.engine.gguf.model_files import (
    GGUF_SUFFIX,
    PACKAGED_MODELS,
    ModelFiles,
    find_gguf_file,
    find_model_in_python_package,
)
from quire.engine.text.tokenizer_files import read_eos_token_ids

_WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""The files of a hub repository that are downloaded."""
HEAD_FILES = (*_WANTED_FILES, "*.bin", "*.pt")
"""The same of a head that guesses tokens: many are published in PyTorch's own format."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def resolve_model(name: str, revision: str | None = None, patterns: Sequence[str] = _WANTED_FILES) -> Path:
    """The directory of a model, or its GGUF file.

    name: a local directory or GGUF file, a model that an installed package carries, or a name on the hub, as hub_name
    reads it, which is downloaded if it is not in the hub's cache. patterns: the files that are downloaded where it is
    no GGUF model. Raises ModelError.
    """
    path = _local_path(name)
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelError(f"model: {name!r} is a file; give a directory, or a {GGUF_SUFFIX} file")
        return path
    if path.is_dir():
        return find_gguf_file(path) or path
    return find_model_in_python_package(name) or download(hub_model(name), revision, patterns)


def must_come(name: str, revision: str | None) -> bool:
    """Whether a model has to be downloaded. Raises ModelError for what is no model's name."""
    if _local_path(name).exists() or name in PACKAGED_MODELS:
        return False
    return not is_cached(hub_model(name), revision)


def pull_model(name: str, revision: str | None) -> Path:
    """The directory of a model, or its GGUF file, as the hub has it now. What Quire does not serve is refused before
    anything large is downloaded. Raises ModelError."""
    if _local_path(name).exists() or name in PACKAGED_MODELS:
        return resolve_model(name)
    hub = hub_model(name)
    if reasons := why_not_served(read_raw_config(name, revision)[0]):
        raise ModelError(f"model: {hub.repo}: {reasons[0]}")
    return download(hub, revision, _WANTED_FILES, newest=True)


def resolve_adapter(name: str) -> Path:
    """The folder of an adapter: a local one, or that of a hub id, which is downloaded. Raises ModelError."""
    folder = adapter_folder(name)
    return folder if isinstance(folder, Path) else download_some(folder, None, _ADAPTER_FILES)


def adapter_folder(name: str) -> Path | HubName:
    """The folder of an adapter on this machine, or else what it is on the hub. Raises ModelError."""
    path = _local_path(name)
    if path.is_dir():
        return path
    hub = hub_name(name)
    if hub is None:
        raise ModelError(f"model: there is no folder {name!r}, and it is not a hub id (OWNER/REPO)")
    return hub


def stored_at(config: EngineConfig) -> Path:
    """The directory, or the GGUF file, of a model's weights: the model's own, or that of the setting `weights`, which
    must be on this machine. Raises ModelError."""
    if config.weights is None:
        return resolve_model(config.model, config.revision)
    path = _local_path(config.weights)
    if path.is_dir():
        return find_gguf_file(path) or path
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    raise ModelError(f"weights: {config.weights!r} is neither a directory nor a {GGUF_SUFFIX} file")


def _local_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~ without a HOME, or ~user without such a user
        raise ModelError(f"model: the home directory of {name!r} is not known") from None


def hub_model(name: str) -> HubName:
    """What the name of a model that is not on this machine means on the hub: a short one, or an id. Raises
    ModelError."""
    known = {} if "/" in name else known_models()
    if name.lower() in known:
        return known[name.lower()].hub
    found = hub_name(name)
    if found is None:
        advice = nearest_models(name, [*PACKAGED_MODELS, *known])
        raise ModelError(
            f"model: there is no directory {name!r}, and it is not a hub id (OWNER/REPO or OWNER/REPO:TAG), nor in "
            "`quire models`"
            f"{advice and f'; {advice}'}"
        )
    return found


def read_raw_config(name: str, revision: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """The content of a config.json, and the directory, or the GGUF file, of the model that it belongs to.

    name: as in resolve_model, or a .json file. Of a hub id only config.json is downloaded, so the directory is None; of
    a GGUF file there only its header. Raises ModelError.
    """
    path, file = _local_path(name), "config.json"
    folder: Path | None
    if path.suffix == ".json":
        path, file = path.parent, path.name
        folder = path
    elif path.exists() or find_model_in_python_package(name) is not None:
        path = folder = resolve_model(name)
    else:
        path = fetch_config(hub_model(name), revision, file, _scratch())
        folder = None if path.is_dir() else path
    files = ModelFiles(path)
    raw = files.read_json_file(file)
    if raw is None:
        raise ModelError(f"model: there is no {file} in {name if folder is None else path.absolute().name}")
    if folder is not None:
        raw = tied_as_stored(raw, checked_text_config(raw, files.file_label(file)), folder)
    check_planned(raw, files.file_label(file))
    return raw, folder


def check_planned(raw: dict[str, Any], label: str) -> None:
    """Raise ModelError, naming the field, for a config.json that nothing can be planned from."""
    with errors_named_as_in_file(names_in_file(raw)):
        convert_parsed_json(checked_text_config(raw, label), PlannedFields, label)


def _scratch() -> Path:
    """A folder for as long as the process lives: what is in it is read again and again."""
    folder = tempfile.mkdtemp(prefix="quire-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def read_model_config(
    path: Path,
    impl: str = "auto",
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    weights: Path | None = None,
) -> ModelConfig:
    """Read the config.json, in transformers' format, of a model directory, or what a GGUF file says instead; `impl`:
    who is to compute it, as the setting `model_impl` says it; `tokenizer`, `chat_template` and `weights` where they are
    not the model's own. Raises ModelError, naming a wrong field."""
    files = ModelFiles(path)
    content, label = files.read_json_file("config.json"), files.file_label("config.json")
    if content is None:
        raise ModelError(f"model: {path.absolute().name or path} has no config.json")
    content = tied_as_stored(content, checked_text_config(content, label), weights or path)
    others = None if tokenizer is None else ModelFiles(tokenizer)
    ends = read_eos_token_ids(files, tokenizer=others, chat_template=chat_template)
    if uses_transformers_class(content, impl):
        return _class_config(files, content, label, ends, forced=impl == "transformers")
    content = (
        checked_text_config(content, label)
        if find_multimodal_family(content.get("model_type")) is not None
        else content
    )
    config = parse_family_config(content, label, ends)
    with errors_named_as_in_file(config.names):
        if (quantized := config.raw.get("quantization_config")) and files.folder is not None:
            weight_formats(quantized)
        _read_generation_config(files)
    return config


def _class_config(
    files: ModelFiles, content: dict[str, Any], label: str, ends: Sequence[int], *, forced: bool
) -> ModelConfig:
    """What Quire itself knows of a model that transformers' class computes. Raises ModelError where it is known not to;
    forced: it is tried all the same."""
    if files.folder is None:
        raise ModelError(f"model: {label}: a GGUF file of a {content['model_type']} is not served")
    if not forced and (reason := family_not_served(content)) is not None:
        raise ModelError(f"model: {label}: model_type: {reason}")
    given = class_config(content)
    raw = convert_parsed_json(text_fields(given), AdaptedFields, label)
    stored: Mapping[str, Any] = {**raw}
    if quantized := raw.get("quantization_config"):
        weight_formats(quantized)
    sizes = {
        name: next((stored[key] for key in keys if isinstance(stored.get(key), int)), 0)
        for name, keys in ALIASES.items()
    }
    for name in ("vocab_size", "hidden_size"):
        if not sizes[name]:
            raise ModelError(f"model: {label}: lacks {name}, needed to serve a {given['model_type']}")
    vocab, heads = sizes["vocab_size"], sizes["num_attention_heads"] or 1
    _read_generation_config(files)
    return ModelConfig(
        model_type=str(given["model_type"]),
        vocab_size=vocab,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"] or 1,
        num_layers=sizes["num_hidden_layers"] or 1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(sizes["hidden_size"] // heads, 1),
        max_position=max((sizes["max_position_embeddings"] or 2048) - first_position(given), 1),
        norm_eps=1e-6,
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        dtype=stored_dtype(raw),
        rope={},
        eos_token_ids=tuple(token for token in ends if 0 <= token < vocab),
        raw={"architectures": raw.get("architectures"), "quantization_config": raw.get("quantization_config")},
        given=given,
    )


def _read_generation_config(files: ModelFiles) -> GenerationFields:
    name = "generation_config.json"
    return convert_parsed_json(files.read_json_file(name) or {}, GenerationFields, files.file_label(name))


def read_generation_defaults(path: Path) -> dict[str, float]:
    """The sampling parameters that generation_config.json recommends; {} if it says that nothing is sampled.

    Raises ModelError, naming the field, for a value that no request could have.
    """
    generation = _read_generation_config(ModelFiles(path))
    if generation.get("do_sample") is False:
        return {}
    given = {
        "temperature": generation.get("temperature"),
        "top_p": generation.get("top_p"),
        "top_k": generation.get("top_k"),
        "min_p": generation.get("min_p"),
        "repetition_penalty": generation.get("repetition_penalty"),
    }
    return {name: value for name, value in given.items() if value is not None}
