"""Finds a model's files, and reads config.json and generation_config.json.

It imports neither torch nor transformers, because importing those takes seconds.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.adapted import class_config, first_position, text_fields
from quire.engine.checkpoint.alike.fields import named_alike
from quire.engine.checkpoint.alike.rope import positions_of, rope_of
from quire.engine.checkpoint.alike.told import names_in_file, told_as_in_file
from quire.engine.checkpoint.catalog import known_models, nearest_models
from quire.engine.checkpoint.download import download, download_some, fetch_config, is_cached
from quire.engine.checkpoint.families import (
    FAMILIES,
    STATES,
    TEXT_SIZES,
    WITH_IMAGES,
    WITHOUT_STATES,
    family_not_served,
    has_file,
    stored_dtype,
    why_not_served,
)
from quire.engine.checkpoint.fields import ALIASES, AdaptedFields, GenerationFields, PlannedFields, ServedFields
from quire.engine.checkpoint.names import HubName, hub_name
from quire.engine.checkpoint.parts.heads import tied_as_stored
from quire.engine.checkpoint.quantization import weight_formats
from quire.engine.config import EngineConfig
from quire.engine.errors import ModelError
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
_LAYER_TYPES = {"full_attention", "sliding_attention"}
"""What layer_types may name in the families that are served;"""
_CHUNKED = {"llama4_text": ("chunked_attention",)}
"""and in some of them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, read from config.json.

    Fields that only some families have stay in `raw`, where the family's module reads them.
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
    """The checkpoint's type, as stored_dtype reads it."""
    rope: dict[str, Any]
    """rope_type, rope_theta, and the keys that the rope_type adds to them."""
    eos_token_ids: tuple[int, ...]
    """All tokens that end an answer, as read_eos_token_ids finds them."""
    raw: ServedFields
    """Each field of its declared type, or None."""
    context: int | None = None
    """Tokens of the longest context that will be served; None: `max_position`."""
    rope_context: int | None = None
    """Tokens of the context for which rotations are chosen; None: they depend on none."""
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By our names of fields, those in the file, where these are others."""
    given: Mapping[str, Any] | None = None
    """The whole of config.json, where transformers' class serves the model; None: a family of ours does."""


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
        raw = tied_as_stored(raw, _text_config(raw, files.file_label(file)), folder)
    check_planned(raw, files.file_label(file))
    return raw, folder


def check_planned(raw: dict[str, Any], label: str) -> None:
    """Raise ModelError, naming the field, for a config.json that nothing can be planned from."""
    with told_as_in_file(names_in_file(raw)):
        convert_parsed_json(_text_config(raw, label), PlannedFields, label)


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
    content = tied_as_stored(content, _text_config(content, label), weights or path)
    others = None if tokenizer is None else ModelFiles(tokenizer)
    ends = read_eos_token_ids(files, tokenizer=others, chat_template=chat_template)
    if by_class(content, impl):
        return _class_config(files, content, label, ends, forced=impl == "transformers")
    content = _text_config(content, label) if str(content.get("model_type")) in WITH_IMAGES else content
    config = parse_family_config(content, label, ends)
    with told_as_in_file(config.names):
        if (quantized := config.raw.get("quantization_config")) and files.folder is not None:
            weight_formats(quantized)
        _read_generation_config(files)
    return config


def parse_family_config(content: Mapping[str, Any], label: str, eos_token_ids: Sequence[int] = ()) -> ModelConfig:
    """`content`: of a config.json of a family that a file of ours serves. `label`: what errors call the file. Raises
    ModelError, naming a wrong field."""
    with told_as_in_file(names := names_in_file(content)):
        raw = convert_parsed_json(named_alike(content), ServedFields, label)
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        vocab_size = _integer(raw, "vocab_size")
        rope = rope_of(raw)
        config = ModelConfig(
            model_type=raw.get("model_type") or "",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_layers=_integer(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if raw.get("num_key_value_heads") is None else _integer(raw, "num_key_value_heads"),
            head_dim=raw.get("head_dim") or hidden // heads,
            max_position=positions_of(raw, rope),
            norm_eps=1e-6 if (eps := raw.get("rms_norm_eps")) is None else eps,
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            dtype=stored_dtype(raw),
            rope=rope,
            eos_token_ids=tuple(token for token in eos_token_ids if 0 <= token < vocab_size),
            raw=raw,
            names=names,
        )
        _check_shape(config)
        return config


def by_class(content: Mapping[str, Any], impl: str) -> bool:
    """Whether transformers' class is to compute the model of a config.json. Raises ModelError where no file of ours
    does, and `impl` asks for one."""
    if has_file(content) and impl != "transformers":
        return False
    if impl == "quire" and content.get("model_type"):
        raise ModelError(f"model_impl: no file of Quire serves a {content['model_type']}; it has {', '.join(FAMILIES)}")
    return bool(content.get("model_type"))


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


def _check_shape(config: ModelConfig) -> None:
    """Raise ModelError where fields that are right alone contradict each other."""

    def wrong(text: str) -> ModelError:
        return ModelError(f"model: config.json: {text}")

    if config.num_heads % config.num_kv_heads:
        raise wrong(f"num_key_value_heads: {config.num_kv_heads} do not divide the {config.num_heads} query heads")
    if config.head_dim < 2 or config.head_dim % 2:
        source = "head_dim" if config.raw.get("head_dim") else "hidden_size / num_attention_heads"
        raise wrong(f"{source}: a head must have an even size, got {config.head_dim}")
    for name, given in (
        ("layer_types", config.raw.get("layer_types")),
        ("no_rope_layers", config.raw.get("no_rope_layers")),
    ):
        if given and len(given) != config.num_layers:
            raise wrong(f"{name}: {len(given)} entries for {config.num_layers} layers")
    kind = config.model_type
    known = {*_LAYER_TYPES, *_CHUNKED.get(kind, ()), *STATES.get(kind, ()), *WITHOUT_STATES.get(kind, ())}
    if unknown := sorted(set(config.raw.get("layer_types") or ()) - known):
        raise wrong(f"layer_types: {unknown[0]!r} is not supported")


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model's text decoder.

    If a model also takes images or audio, it is an object inside config.json. The keys of that object then override
    the outer keys of the same name.
    """
    part = raw.get("text_config") or raw.get("llm_config") or raw.get("language_config")
    kind = WITH_IMAGES.get(str(raw.get("model_type")), raw.get("model_type"))
    given = {**raw, "model_type": kind, **(part if isinstance(part, Mapping) else {})}
    if kind == "clip_text_model":  # where the text part says another, nobody reads it
        given["projection_dim"] = raw.get("projection_dim")
    left_out = TEXT_SIZES.get(str(given["model_type"]), {}) if part and raw.get("model_type") in WITH_IMAGES else {}
    return named_alike({**left_out, **given})


def _text_config(raw: dict[str, Any], file: str) -> dict[str, Any]:
    """The same; raises ModelError where it is no object."""
    for key in ("text_config", "llm_config", "language_config"):
        if not isinstance(raw.get(key) or {}, dict):
            raise ModelError(f"model: {file}: {key}: expected object")
    return text_config(raw)


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


def _integer(raw: ServedFields, key: str) -> int:
    """An integer that config.json must have. Raises ModelError, naming the key."""
    value = raw.get(key)
    if not isinstance(value, int):
        family = f"config.json of a {raw.get('model_type')!r}"
        raise ModelError(f"model: {family} lacks {key}, needed to build a decoder")
    return value
