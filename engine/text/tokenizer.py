"""Turns text into token ids and back, with the tokenizers library and the files of a model directory.

Only a directory without a tokenizer.json needs transformers, which is imported only then because that takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import tokenizers

from quire.engine.errors import ConfigError, ModelError

SPACE_MARK = "\u2581"
"""The character that SentencePiece writes for a space."""


class Scheme(Enum):
    """How a vocabulary's token strings become text. The tokenizer's decoder settings tell which scheme it uses."""

    BYTE_LEVEL = "byte_level"
    """As in GPT-2: every character of a token string stands for one byte."""
    SENTENCE_PIECE = "sentence_piece"
    """As in Llama 2: U+2581 stands for a space, `<0xE2>` for one byte, all other characters for themselves."""
    OTHER = "other"
    """Anything else; only the tokenizers library can decode it."""


class Tokenizer:
    """Encodes and decodes texts, and gives the text and bytes of single tokens, which logprobs show."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        """By role (bos_token, eos_token, …): the variables that chat templates can use."""
        self.chat_templates = dict(chat_templates)
        """Jinja sources by name; the usual one is "default"."""
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.scheme, self.strips_first_space = _read_decoder(backend)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> Tokenizer:
        """Read a model directory.

        chat_template: a file or the template itself, to be used instead of the model's own.
        Raises ModelError when the directory has no readable tokenizer, ConfigError when the template's file cannot be
        read.
        """
        path = Path(path)
        config = _read_json(path / "tokenizer_config.json")
        special_map = _read_json(path / "special_tokens_map.json")
        special_tokens = _special_tokens(special_map) | _special_tokens(config)
        try:
            if (path / "tokenizer.json").is_file():
                backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
                _add_missing_tokens(backend, config, special_tokens)
            else:
                backend = _load_by_transformers(path)
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises no narrower type
            raise ModelError(f"cannot read the tokenizer of {path.name}: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_templates=_chat_templates(path, config) if chat_template is None else _given_template(chat_template),
            eos_token_ids=_eos_token_ids(path),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with add_special_tokens also those that the tokenizer puts around it, such as BOS."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string for an id, such as `Ġhello` or `▁hello`; None for an id outside the vocabulary."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; empty for an id outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._decode_token(self.token(token_id) or "")
        return cached

    def token_text(self, token_id: int) -> str:
        r"""A single token as shown in logprobs; a part of a character is written as OpenAI does: `\xe2\x82`."""
        cached = self._texts.get(token_id)
        if cached is None:
            raw = self.token_bytes(token_id)
            try:
                cached = raw.decode()
            except UnicodeDecodeError:
                cached = "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = cached
        return cached

    def _decode_token(self, token: str) -> bytes:
        """The bytes that a vocabulary string stands for."""
        if self.scheme is Scheme.BYTE_LEVEL:
            values = [BYTE_OF_CHARACTER.get(character) for character in token]
            # If a token has a character outside of GPT-2's map (mostly an added token), the library takes all of it as
            # plain text.
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        byte = fallback_byte(token)
        return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


def fallback_byte(token: str) -> int | None:
    """The byte that a SentencePiece token such as `<0xE2>` stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _bytes_as_characters() -> dict[str, int]:
    """GPT-2's map from characters to bytes (Radford et al., 2019).

    Printable bytes are written as themselves, the others as characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _bytes_as_characters()


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[Scheme, bool]:
    """Returns the scheme, and whether decoding drops the first space of a text."""
    if backend.decoder is None:
        return Scheme.OTHER, False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Scheme.BYTE_LEVEL, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        space = steps[0]["pattern"] == {"String": SPACE_MARK} and steps[0]["content"] == " "
        strip = steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        if space and (strip or not steps[3:]):
            return Scheme.SENTENCE_PIECE, strip
    return Scheme.OTHER, False


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} for a file that is missing or empty, or that does not contain an object."""
    if not path.is_file() or path.stat().st_size == 0:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The entries named `…_token`, by name. Each is a string, or an object with the string as its `content`."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Complete the vocabulary as transformers does.

    Tokens that only tokenizer_config.json lists are added, and every token with a role becomes a special token.
    """
    known = backend.get_added_tokens_decoder()
    listed = {int(key): value for key, value in config.get("added_tokens_decoder", {}).items()}
    for token_id, entry in sorted(listed.items()):
        if token_id not in known:
            token = tokenizers.AddedToken(**{name: entry[name] for name in ADDED_TOKEN_FIELDS if name in entry})
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    by_content = {token.content: token for token in known.values()}
    for content in special_tokens.values():
        if content not in special and backend.token_to_id(content) is not None:
            old = by_content.get(content)
            token = tokenizers.AddedToken(content, special=True, normalized=False)
            if old is not None:
                token = tokenizers.AddedToken(
                    content, special=True, normalized=old.normalized, lstrip=old.lstrip, rstrip=old.rstrip
                )
            backend.add_special_tokens([token])


ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _load_by_transformers(path: Path) -> tokenizers.Tokenizer:
    """Let transformers convert other tokenizer files, such as SentencePiece's tokenizer.model."""
    if not any(path.glob("*.json")):
        raise ModelError(f"model: {path.name} has no config.json and no tokenizer")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{path.name} has no fast tokenizer (no tokenizer.json, and transformers builds none)")
    return backend


def _given_template(given: str) -> dict[str, str]:
    """Read a template given by its path or as Jinja source; what contains a brace is taken as source."""
    try:
        return {"default": given if "{" in given else Path(given).expanduser().read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {error}", param="chat_template") from error


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name. A file of its own overrides tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        templates.update({item["name"]: item["template"] for item in entry})
    as_json = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(as_json, str):
        templates["default"] = as_json
    if (path / "chat_template.jinja").is_file():
        templates["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _eos_token_ids(path: Path) -> list[int]:
    """The end-of-sequence ids in generation_config.json, which holds one id, several or none."""
    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
