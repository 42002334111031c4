from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

import msgspec

from quire.engine.common.errors import ConfigError, InvalidRequest, ModelError
from quire.engine.common.folder_reader import MIB, convert_parsed_json, decode_json, read_text_if_present
from quire.engine.families.base.schema.config_schema import TEXT_CONFIG_KEYS
from quire.engine.gguf.hf_tokenizer import HARMONY_END_TOKENS
from quire.engine.gguf.model_files import ModelFiles

if TYPE_CHECKING:
    from quire.engine.text.conversation.chat_template import ChatRenderer

MAX_TEMPLATE_BYTES = 256 * 1024
"""Models' templates have about 10 KB. Compiling a template of this size takes seconds."""
MAX_CONFIG_BYTES = 16 * MIB
MAX_TOKENIZER_BYTES = 256 * MIB


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


_SpecialToken = _AddedToken | str | None


class _TokenizerConfigFields(TypedDict, total=False):
    """Fields of tokenizer_config.json, special_tokens_map.json and chat_template.json. The files may also have other
    `*_token` entries.
    """

    bos_token: _SpecialToken
    eos_token: _SpecialToken
    unk_token: _SpecialToken
    sep_token: _SpecialToken
    pad_token: _SpecialToken
    cls_token: _SpecialToken
    mask_token: _SpecialToken
    added_tokens_decoder: dict[int, _AddedToken] | None
    chat_template: str | list[_NamedTemplate] | None


def read_config_object(files: ModelFiles, name: str) -> dict[str, Any]:
    """Returns {} if there is no file. Raises ModelError."""
    content = files.read_json_file(name, MAX_CONFIG_BYTES) or {}
    return {**content, **convert_parsed_json(content, _TokenizerConfigFields, files.file_label(name))}


def special_tokens_from_config(config: Mapping[str, Any]) -> dict[str, str]:
    special_tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            special_tokens[name] = content
    return special_tokens


def read_special_tokens(files: ModelFiles, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer_config.json overrides special_tokens_map.json. Raises ModelError."""
    # Some models have an empty file, which transformers accepts.
    empty = files.read_file_bytes("special_tokens_map.json", MAX_CONFIG_BYTES, may_be_empty=True) == b""
    special_map = {} if empty else read_config_object(files, "special_tokens_map.json")
    return special_tokens_from_config(special_map) | special_tokens_from_config(tokenizer_config)


def templates_from_path_or_source(path_or_source: str) -> dict[str, str]:
    """A text that contains a brace is Jinja source, any other a path."""
    try:
        return {
            "default": path_or_source
            if "{" in path_or_source
            else Path(path_or_source).expanduser().read_text(encoding="utf-8")
        }
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {path_or_source}: {error}", param="chat_template") from error


def read_chat_templates(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, str]:
    """Separate template files override tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update({item["name"]: item["template"] for item in entry})
    as_json = read_config_object(files, "chat_template.json").get("chat_template")
    if isinstance(as_json, str):
        templates["default"] = as_json
    template_files = {}
    if files.folder is not None:
        template_files["default"] = files.folder / "chat_template.jinja"
        others = (files.folder / "additional_chat_templates").glob("*.jinja")
        template_files |= {file.stem: file for file in sorted(others)}
    for name, file in template_files.items():
        text = read_text_if_present(file, MAX_TEMPLATE_BYTES)
        if text is not None:
            templates[name] = text
    if too_long := [name for name, text in templates.items() if len(text) > MAX_TEMPLATE_BYTES]:
        raise ModelError(f"model: the chat template {too_long[0]!r} is longer than {MAX_TEMPLATE_BYTES} characters")
    return templates


def read_eos_token_ids(
    model: ModelFiles,
    vocab_size: int | None = None,
    *,
    tokenizer: ModelFiles | None = None,
    chat_template: str | None = None,
) -> tuple[int, ...]:
    """Returns all tokens that end an answer: those of generation_config.json and config.json (or the GGUF header),
    `eos_token`, and the token that ends an assistant's turn in the chat template. `vocab_size`: the model's; ids beyond
    it are dropped. `tokenizer`: files of a separate tokenizer. Broken files are ignored, because other readers report
    them.
    """
    ids: list[int] = []
    for content in (
        _read_json_or_empty(model, "generation_config.json"),
        *_text_configs(_read_json_or_empty(model, "config.json")),
    ):
        value = content.get("eos_token_id")
        ids += [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
    try:
        reader = _SpecialTokenReader(tokenizer or model)
        if (eos := reader.eos_token_id) is not None:
            ids.append(eos)
        template = (
            reader.chat_template
            if chat_template is None
            else templates_from_path_or_source(chat_template).get("default")
        )
        if template is not None:
            ids += reader.end_of_turn_ids(template, ids)
    except (ConfigError, ModelError):
        pass
    return tuple(token for token in dict.fromkeys(ids) if vocab_size is None or 0 <= token < vocab_size)


def _read_json_or_empty(files: ModelFiles, name: str) -> dict[str, Any]:
    try:
        return files.read_json_file(name) or {}
    except ModelError:
        return {}


def _text_configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    parts = (config.get(name) for name in TEXT_CONFIG_KEYS)
    return [config, *(part for part in parts if isinstance(part, dict))]


class _TokenizerJsonToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _TokenizerJsonModel(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerJson(msgspec.Struct, frozen=True):
    """Decodes only special tokens' ids, because decoding more takes a second."""

    added_tokens: tuple[_TokenizerJsonToken, ...] = ()
    model: _TokenizerJsonModel = _TokenizerJsonModel()


class _SpecialTokenReader:
    """Raises ModelError if files are unreadable."""

    def __init__(self, files: ModelFiles) -> None:
        config = read_config_object(files, "tokenizer_config.json")
        self._special_tokens = read_special_tokens(files, config)
        added = files.read_json_file("added_tokens.json", MAX_CONFIG_BYTES) or {}
        self._token_ids: dict[str, int] = {name: each for name, each in added.items() if type(each) is int}
        self._token_ids |= {
            token["content"]: each for each, token in (config.get("added_tokens_decoder") or {}).items()
        }
        self._raw_vocab = b"{}"
        if (
            files.folder is not None
            and (content := files.read_file_bytes("tokenizer.json", MAX_TOKENIZER_BYTES)) is not None
        ):
            stored = decode_json(content, _TokenizerJson, files.file_label("tokenizer.json"))
            self._token_ids |= {token.content: token.id for token in stored.added_tokens}
            self._raw_vocab = bytes(stored.model.vocab)
        self.chat_template = read_chat_templates(files, config).get("default")

    @property
    def eos_token_id(self) -> int | None:
        token = self._special_tokens.get("eos_token")
        if token is None or token in self._token_ids:
            return self._token_ids.get(token or "")
        vocab: Any = msgspec.json.decode(self._raw_vocab)
        if isinstance(vocab, dict):
            token_id = vocab.get(token)
            return token_id if type(token_id) is int else None
        pairs = enumerate(vocab if isinstance(vocab, list) else ())
        return next((index for index, pair in pairs if isinstance(pair, list) and pair[:1] == [token]), None)

    def end_of_turn_ids(self, template: str, ends: Sequence[int]) -> list[int]:
        """Returns the special token directly after an assistant's text, if it always ends the turn: it must be the same
        token after the last message and before a user's message. That excludes harmony's `<|return|>` and tokens that
        begin the user's turn. Tokens inside answers are excluded too: those between reasoning, text and calls,
        `<|end|>` if the vocabulary has harmony's end tokens, and a token before one of `ends`.
        """
        from quire.engine.text.conversation.chat_template import (
            ChatRenderer,  # imports Jinja, which most callers do not need
        )

        tokens = sorted(self._token_ids, key=len, reverse=True)
        # Adaptation could move text out of the answer, so it is off.
        renderer = ChatRenderer(
            {"default": template}, self._special_tokens, allow_unknown_roles=True, adapt_conversations=False
        )
        question = {"role": "user", "content": "quireq"}
        answer = {"role": "assistant", "content": _ANSWER}
        last = _special_tokens_after_answer(_render_or_empty(renderer, [question, answer]), tokens)
        inside = _special_tokens_after_answer(_render_or_empty(renderer, [question, answer, question]), tokens)
        if not last or not inside or last[0] != inside[0]:
            return []
        end = inside[0]
        thoughtful = _render_or_empty(renderer, [question, {**answer, "reasoning_content": _THOUGHT}])
        calling = _render_or_empty(renderer, [question, {**answer, "tool_calls": [_CALL]}])
        goes_on = end in _text_between(thoughtful, _THOUGHT, _ANSWER) or end in _text_between(
            calling, _ANSWER, _FUNCTION_NAME
        )
        harmony = end == "<|end|>" and self._token_ids.keys() >= HARMONY_END_TOKENS
        if goes_on or harmony or any(self._token_ids[token] in ends for token in inside[1:]):
            return []
        return [self._token_ids[end]]


_ANSWER = "quireanswerq"
_THOUGHT = "quirethoughtq"
_FUNCTION_NAME = "quirecalledq"
_CALL = {"id": "quireidqq", "type": "function", "function": {"name": _FUNCTION_NAME, "arguments": {}}}


def _text_between(text: str, begin: str, end: str) -> str:
    rest = text.partition(begin)[2]
    return rest[: max(rest.find(end), 0)]


def _render_or_empty(renderer: ChatRenderer, messages: Sequence[dict[str, Any]]) -> str:
    try:
        return renderer.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return ""


def _special_tokens_after_answer(text: str, tokens: Sequence[str]) -> list[str]:
    """`tokens` must be sorted by length, longest first."""
    rest, run = text.rpartition(_ANSWER)[2] if _ANSWER in text else "", list[str]()
    while next_token := next((token for token in tokens if token and rest.startswith(token)), None):
        run.append(next_token)
        rest = rest[len(next_token) :]
    return run
