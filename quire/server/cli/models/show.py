"""`quire show MODEL`: describes a model of a running server, or from its files, like Ollama's command. config.json is
fetched if the model is not downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import extract_text_config
from quire.engine.checkpoint.model_catalog import CatalogEntry, load_catalog
from quire.engine.checkpoint.model_resolver import read_generation_defaults, read_raw_config
from quire.engine.checkpoint.overrides import load_model_config
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.errors import ConfigError, ModelError, QuireError
from quire.engine.gguf.file_names import part_paths
from quire.engine.gguf.model_files import ModelFiles
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.text.tokenizer_files import read_chat_templates, read_config_object, special_tokens_from_config
from quire.server.cli.flags import ExclusiveFlags, build_parser
from quire.server.cli.models.downloaded import format_size
from quire.server.cli.models.model_names import equivalent_names
from quire.server.cli.models.server_requests import LOCAL_URL, open_client, request_json
from quire.server.cli.server_client import KeyRefused, ServerUnreachable, server_flags
from quire.server.cli.unknown_flags import parse_flags
from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats, list_capabilities

_PART_FLAGS = {
    "--license": "its licence",
    "--modelfile": "its table for quire serve --models",
    "--parameters": "its sampling defaults",
    "--system": "its system message, if a table of --models gives it one",
    "--template": "its chat template",
}


def main(argv: Sequence[str], started: float) -> int:
    parts = {name: {"action": "store_true", "help": f"print only {text}"} for name, text in _PART_FLAGS.items()}
    unneeded = {"-v --verbose": {"action": "store_true", "help": argparse.SUPPRESS}}
    flags = {
        "name": {"metavar": "MODEL", "help": "model, as for quire serve, or the name of one on a running server"},
        "part": ExclusiveFlags(parts),
        **unneeded,
        **server_flags(LOCAL_URL),
    }
    args = parse_flags(build_parser("quire show", __doc__, flags), argv)
    description = _describe_served(args)
    if description is None:
        description = describe_stored(args.name)
    part = next((name[2:] for name in _PART_FLAGS if getattr(args, name[2:])), None)
    print(_format_description(description) if part is None else description.get(part, ""))
    return 0


def _describe_served(args: argparse.Namespace) -> dict[str, Any] | None:
    try:
        with open_client(args) as http:
            served = [str(each["id"]) for each in request_json(http, "GET", "/v1/models")["data"]]
            name = next((each for each in equivalent_names(args.name) if each in served), None)
            if name is None:
                return None
            details = request_json(http, "POST", "/api/show", {"model": name})
    except (KeyRefused, ServerUnreachable):
        if args.url != LOCAL_URL:
            raise
        return None
    except (QuireError, KeyError, TypeError):
        return None
    info = details.get("model_info", {})
    return {
        "Model": {
            "name": name,
            "architecture": info.get("general.architecture", ""),
            "context length": next((value for key, value in info.items() if key.endswith("context_length")), ""),
            "quantization": details.get("details", {}).get("quantization_level", ""),
        },
        "Capabilities": details.get("capabilities", []),
        "parameters": details.get("parameters", ""),
        "template": details.get("template", ""),
        "modelfile": _models_file_toml(name, {}),
    }


def describe_stored(name: str) -> dict[str, Any]:
    """Raises ModelError."""
    entry = next((each for each in load_catalog().values() if each.name in equivalent_names(name)), None)
    raw, folder = _config_from_files_or_catalog(name, entry)
    sizes, text = read_model_sizes(raw), extract_text_config(raw)
    method = (text.get("quantization_config") or {}).get("quant_method", "")
    bits = method if folder is None or folder.is_dir() else "GGUF"
    parameters = sizes.num_parameters
    description: dict[str, Any] = {
        "Model": {
            "architecture": sizes.model_type,
            "parameters": f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M",
            "context length": sizes.max_position,
            "embedding length": text.get("hidden_size", ""),
            "quantization": bits or str(text.get("torch_dtype") or text.get("dtype") or ""),
            "size": "" if folder is None else format_size(_total_bytes(folder)),
            "place": "" if folder is None else str(folder),
        },
        "parameters": "",
        "template": "",
        "license": "" if entry is None else entry.licence,
        "modelfile": _models_file_toml(name, {}),
    }
    if folder is not None:
        defaults = read_generation_defaults(folder)
        description["parameters"] = "\n".join(f"{key} {value:g}" for key, value in defaults.items())
        templates = _StoredTemplates.from_files(folder)
        description["template"] = "\n".join(templates.chat_templates.values())
        description["Capabilities"] = _stored_capabilities(name, folder, templates)
    return description


@dataclass(frozen=True, slots=True)
class _StoredTemplates:
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @classmethod
    def from_files(cls, path: Path) -> _StoredTemplates:
        files = ModelFiles(path)
        config = read_config_object(files, "tokenizer_config.json")
        return cls(read_chat_templates(files, config), special_tokens_from_config(config))


def _stored_capabilities(name: str, path: Path, templates: _StoredTemplates) -> list[str]:
    """What a server with default settings reports. Returns [] for a model that it would refuse."""
    config = ServerConfig(model=name)
    try:
        tasks = read_pooling_and_tasks(path, load_model_config(config, path), config)[1]
        images = read_vision_spec(path) is not None
        return list_capabilities(tasks, ChatFormats.from_config(config, templates), accepts_images=images)
    except (ModelError, ConfigError):
        return []


def _config_from_files_or_catalog(name: str, entry: CatalogEntry | None) -> tuple[Mapping[str, Any], Path | None]:
    try:
        return read_raw_config(name)
    except ModelError:
        if entry is None:
            raise
        return entry.config, None


def _total_bytes(path: Path) -> int:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else part_paths(path)
    return sum(file.stat().st_size for file in files)


def _models_file_toml(name: str, settings: Mapping[str, Any]) -> str:
    return "\n".join([f'["mine"]\nmodel = "{name}"', *(f"{key} = {value}" for key, value in settings.items())])


def _format_description(description: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for title in ("Model", "Capabilities", "parameters", "license"):
        content = description.get(title)
        if not content:
            continue
        lines += ["", f"  {title.capitalize()}"]
        if isinstance(content, dict):
            lines += [f"    {name:<18}{value}" for name, value in content.items() if value != ""]
        elif isinstance(content, list):
            lines += [f"    {each}" for each in content]
        else:
            lines += [f"    {line}" for line in str(content).splitlines()]
    return "\n".join(lines[1:])
