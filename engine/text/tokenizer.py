"""Text to token ids and back, read from a model directory by the tokenizers library: no torch, no transformers.

transformers is the fallback for directories without a tokenizer.json, and imported only then: it costs seconds.
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
"""SentencePiece's visible space."""


class Scheme(Enum):
    """How token strings become text, told by the tokenizer's decoder."""

    BYTE_LEVEL = "byte_level"
    """GPT-2's: every character of a token string stands for one byte."""
    SENTENCE_PIECE = "sentence_piece"
    """Llama 2's: U+2581 is a space, `<0xE2>` a byte, all else itself."""
    OTHER = "other"
    """Known to the tokenizers library alone."""


class Tokenizer:
    """Encodes and decodes; also knows what single tokens look like, for logprobs."""

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
        """By role: bos_token, eos_token, …: the variables that chat templates use."""
        self.chat_templates = dict(chat_templates)
        """By name; the usual one is "default"."""
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
        """Read a model directory; `chat_template`, a file or the template itself, stands in for its own. Raises
        ModelError when it holds no tokenizer that can be read, ConfigError where there is no such template."""
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
        except Exception as error:  # the library raises bare Exception
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
        """Token ids of a text; with add_special_tokens the tokenizer puts its BOS (or what it uses) around them."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string for an id, as `Ġhello` or `▁hello`; None for an id it does not hold."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds in the middle of a text; empty for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(self.token(token_id) or "")
        return known

    def token_text(self, token_id: int) -> str:
        r"""A single token as users read it in logprobs; a part of a character as OpenAI writes it: `\xe2\x82`."""
        known = self._texts.get(token_id)
        if known is None:
            raw = self.token_bytes(token_id)
            try:
                known = raw.decode()
            except UnicodeDecodeError:
                known = "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = known
        return known

    def _spell(self, token: str) -> bytes:
        if self.scheme is Scheme.BYTE_LEVEL:
            values = [BYTE_OF_CHARACTER.get(character) for character in token]
            # The library takes a token with one foreign character (an added one, mostly) as plain text, whole.
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        byte = fallback_byte(token)
        return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


def fallback_byte(token: str) -> int | None:
    """The byte that SentencePiece's `<0xE2>` stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _bytes_as_characters() -> dict[str, int]:
    """GPT-2's reversible map (Radford et al., 2019): printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _bytes_as_characters()


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[Scheme, bool]:
    """The scheme, and whether the first space of a text is dropped."""
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
    if not path.is_file() or path.stat().st_size == 0:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Every `…_token` entry: a string, or an object with its content."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """What transformers does on loading: tokens that tokenizer_config.json alone knows join, and roles are special."""
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
    if not any(path.glob("*.json")):
        raise ModelError(f"model: {path.name} has no config.json and no tokenizer")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{path.name} has no fast tokenizer (no tokenizer.json, and transformers builds none)")
    return backend


def _given_template(given: str) -> dict[str, str]:
    """By its path, or as it is: no path has a brace."""
    try:
        return {"default": given if "{" in given else Path(given).expanduser().read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {given}: {error}", param="chat_template") from error


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A file beside the weights wins over tokenizer_config.json, as in transformers."""
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
    """From generation_config.json: one id or several."""
    eos = _read_json(path / "generation_config.json").get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
