"""Finds models' files and configuration. Imports neither torch nor transformers, whose imports take seconds."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import (
    checkpoint_dtype,
    explain_unsupported_family,
    explain_unsupported_model,
    file_field_names,
    parse_family_config,
    parse_text_config,
    use_file_names_in_errors,
    uses_transformers_backend,
)
from quire.engine.checkpoint.hub_download import download_files, download_from_hub, fetch_config, has_cached_weights
from quire.engine.checkpoint.hub_names import HubName, parse_hub_name
from quire.engine.checkpoint.model_catalog import load_catalog, suggest_short_name
from quire.engine.checkpoint.output_head import correct_tie_word_embeddings
from quire.engine.checkpoint.quantization import (
    HF_QUANT_CONFIG_FILE,
    merge_modelopt_config,
    parse_quantization_config,
)
from quire.engine.checkpoint.transformers_classes import (
    config_for_transformers_class,
    first_position_id,
    merge_text_config,
)
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import convert_parsed_json
from quire.engine.common.request_params import MODEL_DEFAULT_FIELDS
from quire.engine.families import find_multimodal_family
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import (
    SIZE_FIELD_ALIASES,
    GenerationConfigFields,
    PlanConfigFields,
    TransformersConfigFields,
)
from quire.engine.gguf.file_names import GGUF_SUFFIX
from quire.engine.gguf.model_files import (
    PACKAGED_MODELS,
    ModelFiles,
    find_gguf_file,
    find_model_in_python_package,
)
from quire.engine.text.tokenizer_files import read_eos_token_ids

_MODEL_FILE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
DRAFT_HEAD_FILE_PATTERNS = (*_MODEL_FILE_PATTERNS, "*.bin", "*.pt")
_ADAPTER_FILE_NAMES = ("adapter_config.json", "adapter_model.safetensors")


def resolve_model(name: str, revision: str | None = None, patterns: Sequence[str] = _MODEL_FILE_PATTERNS) -> Path:
    """Return the folder or GGUF file. `name` is a path, a packaged model, or a hub name. Raises ModelError."""
    path = _local_path(name)
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelError(f"model: {name!r} is a file; give a directory, or a {GGUF_SUFFIX} file")
        return path
    if path.is_dir():
        return find_gguf_file(path) or path
    return find_model_in_python_package(name) or download_from_hub(resolve_hub_name(name), revision, patterns)


def needs_download(name: str, revision: str | None) -> bool:
    """Raises ModelError for an invalid name."""
    if _local_path(name).exists() or name in PACKAGED_MODELS:
        return False
    return not has_cached_weights(resolve_hub_name(name), revision)


def pull_model(name: str, revision: str | None) -> Path:
    """Raises ModelError for an unsupported model before its weights are downloaded."""
    if _local_path(name).exists() or name in PACKAGED_MODELS:
        return resolve_model(name)
    hub = resolve_hub_name(name)
    if reasons := explain_unsupported_model(read_raw_config(name, revision)[0]):
        raise ModelError(f"model: {hub.repo}: {reasons[0]}")
    return download_from_hub(hub, revision, _MODEL_FILE_PATTERNS, refresh=True)


def resolve_adapter(name: str) -> Path:
    """Raises ModelError."""
    folder = locate_adapter(name)
    return folder if isinstance(folder, Path) else download_files(folder, None, _ADAPTER_FILE_NAMES)


def locate_adapter(name: str) -> Path | HubName:
    """Raises ModelError."""
    path = _local_path(name)
    if path.is_dir():
        return path
    hub = parse_hub_name(name)
    if hub is None:
        raise ModelError(f"model: there is no folder {name!r}, and it is not a hub id (OWNER/REPO)")
    return hub


def resolve_weights(config: EngineConfig) -> Path:
    """Raises ModelError."""
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
    except RuntimeError:  # ~ without HOME, or ~user for an unknown user
        raise ModelError(f"model: the home directory of {name!r} is not known") from None


def resolve_hub_name(name: str) -> HubName:
    """Accepts short names and hub ids. Raises ModelError."""
    catalog = {} if "/" in name else load_catalog()
    if name.lower() in catalog:
        return catalog[name.lower()].hub_name
    hub_id = parse_hub_name(name)
    if hub_id is None:
        advice = suggest_short_name(name, [*PACKAGED_MODELS, *catalog])
        raise ModelError(
            f"model: there is no directory {name!r}, and it is not a hub id (OWNER/REPO or OWNER/REPO:TAG), nor in "
            "`quire models`"
            f"{advice and f'; {advice}'}"
        )
    return hub_id


def read_raw_config(name: str, revision: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """Downloads only configurations or GGUF headers. `name` may also be a .json file. The folder is None if
    configurations are downloaded. Raises ModelError.
    """
    path, file_name = _local_path(name), "config.json"
    folder: Path | None
    if path.suffix == ".json":
        path, file_name = path.parent, path.name
        folder = path
    elif path.exists() or find_model_in_python_package(name) is not None:
        path = folder = resolve_model(name)
    else:
        path = fetch_config(resolve_hub_name(name), revision, (file_name, HF_QUANT_CONFIG_FILE), _make_temp_dir())
        folder = None if path.is_dir() else path
    files = ModelFiles(path)
    raw = read_config_json(files, file_name)
    if raw is None:
        raise ModelError(f"model: there is no {file_name} in {name if folder is None else path.absolute().name}")
    if folder is not None:
        raw = correct_tie_word_embeddings(raw, parse_text_config(raw, files.file_label(file_name)), folder)
    check_config_fields(raw, files.file_label(file_name))
    return raw, folder


def read_config_json(files: ModelFiles, file_name: str = "config.json") -> dict[str, Any] | None:
    """Merges ModelOpt's file. Raises ModelError."""
    content = files.read_json_file(file_name)
    if content is None or files.folder is None:
        return content
    return merge_modelopt_config(content, files.read_json_file(HF_QUANT_CONFIG_FILE))


def check_config_fields(raw: dict[str, Any], label: str) -> None:
    """Raises ModelError naming a wrong field."""
    with use_file_names_in_errors(file_field_names(raw)):
        convert_parsed_json(parse_text_config(raw, label), PlanConfigFields, label)


def _make_temp_dir() -> Path:
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
    """Optional arguments override the model's own files. Raises ModelError naming a wrong field."""
    files = ModelFiles(path)
    content, label = read_config_json(files), files.file_label("config.json")
    if content is None:
        raise ModelError(f"model: {path.absolute().name or path} has no config.json")
    content = correct_tie_word_embeddings(content, parse_text_config(content, label), weights or path)
    if uses_transformers_backend(content, impl):
        config = _read_transformers_config(files, content, label, forced=impl == "transformers")
    else:
        config = _read_family_config(files, content, label)
    tokenizer_files = None if tokenizer is None else ModelFiles(tokenizer)
    eos_token_ids = read_eos_token_ids(files, config.vocab_size, tokenizer=tokenizer_files, chat_template=chat_template)
    return replace(config, eos_token_ids=eos_token_ids)


def _read_family_config(files: ModelFiles, content: dict[str, Any], label: str) -> ModelConfig:
    content = (
        parse_text_config(content, label) if find_multimodal_family(content.get("model_type")) is not None else content
    )
    config = parse_family_config(content, label)
    with use_file_names_in_errors(config.file_field_names):
        if (quantization := config.raw.get("quantization_config")) and files.folder is not None:
            parse_quantization_config(quantization)
        _read_generation_fields(files)
    return config


def _read_transformers_config(files: ModelFiles, content: dict[str, Any], label: str, *, forced: bool) -> ModelConfig:
    """`forced` skips the check for classes that are known not to work."""
    if files.folder is None:
        raise ModelError(f"model: {label}: a GGUF file of a {content['model_type']} is not served")
    if not forced and (reason := explain_unsupported_family(content)) is not None:
        raise ModelError(f"model: {label}: model_type: {reason}")
    hf_config = config_for_transformers_class(content)
    raw = convert_parsed_json(merge_text_config(hf_config), TransformersConfigFields, label)
    field_values: Mapping[str, Any] = {**raw}
    if quantization := raw.get("quantization_config"):
        parse_quantization_config(quantization)
    model_sizes = {
        name: next((field_values[key] for key in keys if isinstance(field_values.get(key), int)), 0)
        for name, keys in SIZE_FIELD_ALIASES.items()
    }
    for name in ("vocab_size", "hidden_size"):
        if not model_sizes[name]:
            raise ModelError(f"model: {label}: lacks {name}, needed to serve a {hf_config['model_type']}")
    vocab, heads = model_sizes["vocab_size"], model_sizes["num_attention_heads"] or 1
    _read_generation_fields(files)
    return ModelConfig(
        model_type=str(hf_config["model_type"]),
        vocab_size=vocab,
        hidden_size=model_sizes["hidden_size"],
        intermediate_size=model_sizes["intermediate_size"] or 1,
        num_layers=model_sizes["num_hidden_layers"] or 1,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(model_sizes["hidden_size"] // heads, 1),
        max_position=max((model_sizes["max_position_embeddings"] or 2048) - first_position_id(hf_config), 1),
        norm_eps=1e-6,
        tie_embeddings=bool(raw.get("tie_word_embeddings")),
        dtype=checkpoint_dtype(raw),
        rope={},
        raw={"architectures": raw.get("architectures"), "quantization_config": raw.get("quantization_config")},
        transformers_config=hf_config,
    )


def _read_generation_fields(files: ModelFiles) -> GenerationConfigFields:
    name = "generation_config.json"
    return convert_parsed_json(files.read_json_file(name) or {}, GenerationConfigFields, files.file_label(name))


def read_generation_defaults(path: Path) -> dict[str, float]:
    """Empty if do_sample is false. Raises ModelError for invalid values."""
    generation = _read_generation_fields(ModelFiles(path))
    if generation.get("do_sample") is False:
        return {}
    values: dict[str, Any] = {each.name: generation.get(each.name) for each in MODEL_DEFAULT_FIELDS}
    return {name: value for name, value in values.items() if value is not None}
