"""Reads what stands beside a tokenizer.json: tokenizer_config.json and its like, chat templates, the ids that end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

from quire.engine.errors import ConfigError, ModelError
from quire.engine.folder import MIB, checked, read_text
from quire.engine.gguf.files import ModelFiles

MAX_TEMPLATE_BYTES = 256 * 1024
"""Of a chat template. Models' have some 10 KB; to compile this many takes seconds."""
CONFIG_BYTES = 16 * MIB


class _AddedToken(TypedDict, total=False):
    content: Required[str]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _NamedTemplate(TypedDict):
    name: str
    template: str


_Special = _AddedToken | str | None


class _Fields(TypedDict, total=False):
    """What is read of tokenizer_config.json, special_tokens_map.json, chat_template.json and generation_config.json,
    beside other entries named `…_token`."""

    bos_token: _Special
    eos_token: _Special
    unk_token: _Special
    sep_token: _Special
    pad_token: _Special
    cls_token: _Special
    mask_token: _Special
    added_tokens_decoder: dict[int, _AddedToken] | None
    chat_template: str | list[_NamedTemplate] | None
    eos_token_id: int | list[int] | None


def read_object(files: ModelFiles, name: str) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file, with its known fields checked. Raises ModelError."""
    content = files.json(name, CONFIG_BYTES) or {}
    return {**content, **checked(content, _Fields, files.label(name))}


def read_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries named `…_token`, by name. Each is a string, or an object with the string as its `content`."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def given_template(given: str) -> dict[str, str]:
    """Read a template given by its path or as Jinja source; what contains a brace is taken as source."""
    try:
        return {"default": given if "{" in given else Path(given).expanduser().read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {error}", param="chat_template") from error


def read_chat_templates(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name. A file of its own overrides tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update({item["name"]: item["template"] for item in entry})
    as_json = read_object(files, "chat_template.json").get("chat_template")
    if isinstance(as_json, str):
        templates["default"] = as_json
    own = {}
    if files.folder is not None:
        own["default"] = files.folder / "chat_template.jinja"
        others = (files.folder / "additional_chat_templates").glob("*.jinja")
        own |= {file.stem: file for file in sorted(others)}
    for name, file in own.items():
        text = read_text(file, MAX_TEMPLATE_BYTES)
        if text is not None:
            templates[name] = text
    if too_long := [name for name, text in templates.items() if len(text) > MAX_TEMPLATE_BYTES]:
        raise ModelError(f"model: the chat template {too_long[0]!r} is longer than {MAX_TEMPLATE_BYTES} characters")
    return templates


def read_eos_token_ids(files: ModelFiles) -> list[int]:
    """The end-of-sequence ids in generation_config.json, which holds one id, several or none."""
    eos = read_object(files, "generation_config.json").get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
