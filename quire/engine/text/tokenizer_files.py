"""Reads what stands beside a tokenizer.json: tokenizer_config.json and its like, chat templates, the ids that end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

import msgspec

from quire.engine.errors import ConfigError, InvalidRequest, ModelError
from quire.engine.folder import MIB, checked, decoded, read_text
from quire.engine.gguf.files import ModelFiles
from quire.engine.gguf.tokenizer import HARMONY_ENDS

if TYPE_CHECKING:
    from quire.engine.text.chat_template import ChatRenderer

MAX_TEMPLATE_BYTES = 256 * 1024
"""Of a chat template. Models' have some 10 KB; to compile this many takes seconds."""
CONFIG_BYTES = 16 * MIB
TOKENIZER_BYTES = 256 * MIB


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
    """What is read of tokenizer_config.json, special_tokens_map.json and chat_template.json, beside other entries named
    `…_token`."""

    bos_token: _Special
    eos_token: _Special
    unk_token: _Special
    sep_token: _Special
    pad_token: _Special
    cls_token: _Special
    mask_token: _Special
    added_tokens_decoder: dict[int, _AddedToken] | None
    chat_template: str | list[_NamedTemplate] | None


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


def read_end_tokens(
    model: ModelFiles, *, tokenizer: ModelFiles | None = None, chat_template: str | None = None
) -> tuple[int, ...]:
    """The tokens that end an answer, for everything that asks: generation_config.json's and config.json's, the
    tokenizer's `eos_token`, and the token with which the chat template ends an assistant's turn.

    tokenizer: the files of another tokenizer, where one is set. chat_template: as in given_template, where one is set.
    What is wrong with files is reported by those who read the rest of them.
    """
    ids: list[int] = []
    for content in (_object(model, "generation_config.json"), *_with_text_part(_object(model, "config.json"))):
        value = content.get("eos_token_id")
        ids += [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
    try:
        vocabulary = _Vocabulary(tokenizer or model)
        if (eos := vocabulary.eos_token_id) is not None:
            ids.append(eos)
        template = vocabulary.chat_template if chat_template is None else given_template(chat_template).get("default")
        if template is not None:
            ids += vocabulary.end_of_turn(template, ids)
    except (ConfigError, ModelError):
        pass
    return tuple(dict.fromkeys(ids))


def _object(files: ModelFiles, name: str) -> dict[str, Any]:
    try:
        return files.json(name) or {}
    except ModelError:
        return {}


def _with_text_part(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config.json's objects that may name the end of a text: it, and its text decoder's."""
    parts = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    return [config, *(part for part in parts if isinstance(part, dict))]


class _StoredToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _StoredModel(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _StoredTokenizer(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that say which ids its special tokens have: to load all of it takes a second."""

    added_tokens: tuple[_StoredToken, ...] = ()
    model: _StoredModel = _StoredModel()


class _Vocabulary:
    """The special tokens of a tokenizer, and the chat template beside it, without the tokenizer itself. Raises
    ModelError for files that cannot be read."""

    def __init__(self, files: ModelFiles) -> None:
        config = read_object(files, "tokenizer_config.json")
        empty = files.bytes("special_tokens_map.json", CONFIG_BYTES, may_be_empty=True) in (b"", None)
        special_map = {} if empty else read_object(files, "special_tokens_map.json")
        self._roles = read_special_tokens(special_map) | read_special_tokens(config)
        added = files.json("added_tokens.json", CONFIG_BYTES) or {}
        self._ids: dict[str, int] = {name: each for name, each in added.items() if type(each) is int}
        self._ids |= {token["content"]: each for each, token in (config.get("added_tokens_decoder") or {}).items()}
        self._rest = b"{}"
        if files.folder is not None and (content := files.bytes("tokenizer.json", TOKENIZER_BYTES)) is not None:
            stored = decoded(content, _StoredTokenizer, files.label("tokenizer.json"))
            self._ids |= {token.content: token.id for token in stored.added_tokens}
            self._rest = bytes(stored.model.vocab)
        self.chat_template = read_chat_templates(files, config).get("default")

    @property
    def eos_token_id(self) -> int | None:
        token = self._roles.get("eos_token")
        if token is None or token in self._ids:
            return self._ids.get(token or "")
        vocab: Any = msgspec.json.decode(self._rest)
        if isinstance(vocab, dict):
            found = vocab.get(token)
            return found if type(found) is int else None
        # Pairs of a token and its score, in the order of the ids.
        pairs = enumerate(vocab if isinstance(vocab, list) else ())
        return next((index for index, pair in pairs if isinstance(pair, list) and pair[:1] == [token]), None)

    def end_of_turn(self, template: str, ends: Sequence[int]) -> list[int]:
        """The special token that a chat template writes at once after an assistant's text, if that can only mean that
        the turn ends.

        It must be the same one after the last message and before a user's, so that neither the `<|return|>` of
        harmony, which ends a conversation, nor a token that begins the user's turn counts. It does not count where it
        also stands between parts of one answer, as harmony's `<|end|>` does between thinking, text and calls; nor, as
        `<|end|>`, where harmony's other ends are in the vocabulary; nor where one of `ends` stands directly after it.
        """
        from quire.engine.text.chat_template import (
            ChatRenderer,  # it imports Jinja, which most who read files do not need
        )

        tokens = sorted(self._ids, key=len, reverse=True)
        # Without adaptation: a text that is moved away from its call into a message of its own is no part of an answer.
        renderer = ChatRenderer({"default": template}, self._roles, any_role=True, adapts=False)
        question = {"role": "user", "content": "quireq"}
        answer = {"role": "assistant", "content": _ANSWER}
        last = _special_run(_rendered(renderer, [question, answer]), tokens)
        inside = _special_run(_rendered(renderer, [question, answer, question]), tokens)
        if not last or not inside or last[0] != inside[0]:
            return []
        end = inside[0]
        thoughtful = _rendered(renderer, [question, {**answer, "reasoning_content": _THOUGHT}])
        calling = _rendered(renderer, [question, {**answer, "tool_calls": [_CALL]}])
        goes_on = end in _between(thoughtful, _THOUGHT, _ANSWER) or end in _between(calling, _ANSWER, _CALLED)
        harmony = end == "<|end|>" and self._ids.keys() >= HARMONY_ENDS
        if goes_on or harmony or any(self._ids[token] in ends for token in inside[1:]):
            return []
        return [self._ids[end]]


_ANSWER, _THOUGHT, _CALLED = "quireanswerq", "quirethoughtq", "quirecalledq"
_CALL = {"id": "quireidqq", "type": "function", "function": {"name": _CALLED, "arguments": {}}}


def _between(text: str, begin: str, end: str) -> str:
    """What stands between two texts; "" where they do not follow one another."""
    rest = text.partition(begin)[2]
    return rest[: max(rest.find(end), 0)]


def _rendered(renderer: ChatRenderer, messages: Sequence[dict[str, Any]]) -> str:
    """ "" where the template refuses the messages."""
    try:
        return renderer.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return ""


def _special_run(text: str, tokens: Sequence[str]) -> list[str]:
    """The special tokens that follow one another directly after the answer's text. tokens: the longest first."""
    rest, run = text.rpartition(_ANSWER)[2] if _ANSWER in text else "", list[str]()
    while found := next((token for token in tokens if token and rest.startswith(token)), None):
        run.append(found)
        rest = rest[len(found) :]
    return run
