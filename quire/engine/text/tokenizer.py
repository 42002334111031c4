"""Encodes and decodes with the tokenizers library. Transformers, whose import takes seconds, is imported only if there
is no tokenizer.json.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.common.folder_reader import open_if_present
from quire.engine.gguf.model_files import ModelFiles
from quire.engine.text.tokenizer_files import (
    MAX_TOKENIZER_BYTES,
    read_chat_templates,
    read_config_object,
    read_eos_token_ids,
    read_special_tokens,
    templates_from_path_or_source,
)
from quire.engine.text.tokenizer_safety import check_normalizer_growth, check_regexes, is_rust_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE_MARK = "\u2581"
log = logging.getLogger("quire.engine")
ADDED_TOKENS_WARNING_THRESHOLD = 200_000
_SECONDS_PER_ADDED_TOKEN = 13e-6
"""Measured: three million added tokens took 40 s."""
_MAX_UNUSED_IDS = 65_536
"""A vocabulary may have this many ids more than tokens."""
_CONVERTIBLE_FILES = ("*.model", "tokenizer.*", "vocab.*", "*.tiktoken", "tekken.json")
_PROBE_TEXT = "A text, with 1 number\n\tand é."
_MAX_ERROR_CHARACTERS = 300


class DecoderType(Enum):
    BYTE_LEVEL = "byte_level"
    """GPT-2's kind: each character of a token stands for a byte."""
    SENTENCE_PIECE = "sentence_piece"
    """Llama 2's kind: U+2581 stands for a space, `<0xE2>` for a byte."""
    OTHER = "other"


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Sequence[int] | None = None,
        config: Mapping[str, Any] | None = None,
        model_vocab_size: int | None = None,
    ) -> None:
        """If `eos_token_ids` is None, `eos_token` ends answers. Ids from `model_vocab_size` on are refused."""
        self.backend = backend
        self.config = dict(config or {})
        self._first_missing_id = (
            None if model_vocab_size is None or self.max_token_id < model_vocab_size else model_vocab_size
        )
        """First id of the tokenizer that the model lacks. Usually None, because the model has all ids."""
        self.special_tokens = dict(special_tokens)
        """Keyed by role, such as bos_token."""
        self.chat_templates = dict(chat_templates)
        self.bos_token_id, self.pad_token_id = self._special_token_id("bos_token"), self._special_token_id("pad_token")
        eos = self._special_token_id("eos_token")
        default_eos_ids = () if eos is None else (eos,)
        self.eos_token_ids = default_eos_ids if eos_token_ids is None else tuple(eos_token_ids)
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.decoder_type, self.strips_first_space = _detect_decoder_type_and_space_strip(backend)
        self._special_token_pattern = _make_token_pattern(backend, self.special_token_ids)
        self._bytes_cache: dict[int, bytes] = {}
        self._text_cache: dict[int, str] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        chat_template: str | None = None,
        model_vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Tokenizer:
        """`chat_template`: a file or Jinja source. Raises ModelError for a missing or unreadable tokenizer, and
        ConfigError for an unreadable template file.
        """
        path = Path(path)
        files = ModelFiles(path)
        config = read_config_object(files, "tokenizer_config.json")
        special_tokens = read_special_tokens(files, config)
        content = files.read_file_bytes("tokenizer.json", MAX_TOKENIZER_BYTES)
        with _wrap_library_errors(path.name if content is None else files.file_label("tokenizer.json")):
            if content is None:
                backend = _load_with_transformers(path)
            else:
                warn_if_added_tokens_load_slowly(content, files.file_label("tokenizer.json"))
                backend = tokenizers.Tokenizer.from_buffer(content)
                _add_missing_tokens(backend, config, special_tokens)
        backend.no_truncation()
        backend.no_padding()
        check_normalizer_growth(backend)
        check_regexes(backend)
        # Some contradictions in a tokenizer show only when it is used.
        with _wrap_library_errors(files.file_label("tokenizer.json")):
            backend.decode(backend.encode(_PROBE_TEXT).ids)
        templates = (
            read_chat_templates(files, config)
            if chat_template is None
            else templates_from_path_or_source(chat_template)
        )
        tokenizer = cls(
            backend,
            special_tokens=special_tokens,
            chat_templates=templates,
            eos_token_ids=read_eos_token_ids(files, model_vocab_size, chat_template=chat_template)
            if eos_token_ids is None
            else eos_token_ids,
            config=config,
            model_vocab_size=model_vocab_size,
        )
        if tokenizer.max_token_id > 2 * tokenizer.vocab_size + _MAX_UNUSED_IDS:  # grammar bitmasks have a bit per id
            raise ModelError(
                f"model: tokenizer.json: one of its {tokenizer.vocab_size} tokens has the id {tokenizer.max_token_id}"
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def max_token_id(self) -> int:
        """-1 if there are no tokens. Finding it takes 0.1 s for 150,000 tokens."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Raises InvalidRequest if the model lacks a token of the text, or the library fails."""
        encodings = self.encodings(texts, add_special_tokens=add_special_tokens)
        return [self.require_model_token_ids(encoding.ids) for encoding in encodings]

    def encodings(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        """Raises InvalidRequest if the library fails."""
        try:
            return list(self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens))
        except TypeError:
            raise InvalidRequest("the text has half a character (a lone surrogate)", param="prompt") from None
        except BaseException as error:
            if not is_rust_panic(error):
                raise
            raise InvalidRequest("the tokenizer failed on this text", param="prompt") from None

    def require_model_token_ids(self, ids: list[int]) -> list[int]:
        """Raises InvalidRequest for an id that the model lacks, because it would end the engine."""
        if self._first_missing_id is not None and ids and (highest := max(ids)) >= self._first_missing_id:
            message = f"the text has the token {self.id_to_token(highest)!r}, which the model has no embedding for"
            raise InvalidRequest(message, param="prompt")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def to_transformers(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.backend, **self.special_tokens)
        tokenizer.chat_template = (
            self.chat_templates.get("default") if len(self.chat_templates) < 2 else self.chat_templates
        )
        return tokenizer

    def split_at_special_tokens(self, text: str) -> list[tuple[str, int | None]]:
        """The id is None for text between special tokens."""
        parts = self._special_token_pattern.split(text) if self._special_token_pattern is not None else [text]
        ids = [self.backend.token_to_id(part) if index % 2 else None for index, part in enumerate(parts)]
        return [(part, token_id) for part, token_id in zip(parts, ids, strict=True) if part]

    @cached_property
    def added_token_pattern(self) -> re.Pattern[str] | None:
        """Matches added tokens such as `<|im_end|>`, which the tokenizer splits off before all other tokens."""
        return _make_token_pattern(self.backend, self.backend.get_added_tokens_decoder())

    def id_to_token(self, token_id: int) -> str | None:
        """Returns a vocabulary entry such as `Ġhello` or `▁hello`."""
        return self.backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds within a text; b"" outside the vocabulary."""
        cached = self._bytes_cache.get(token_id)
        if cached is None:
            cached = self._bytes_cache[token_id] = self._token_string_bytes(self.id_to_token(token_id) or "")
        return cached

    def list_token_bytes(self) -> list[bytes]:
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            texts[token_id] = self._token_string_bytes(token)
        return texts

    def token_display_text(self, token_id: int) -> str:
        r"""Bytes of partial characters are written as OpenAI does: `\xe2\x82`."""
        cached = self._text_cache.get(token_id)
        if cached is None:
            raw = self.token_bytes(token_id)
            try:
                cached = raw.decode()
            except UnicodeDecodeError:
                cached = "".join(f"\\x{byte:02x}" for byte in raw)
            self._text_cache[token_id] = cached
        return cached

    def _token_string_bytes(self, token: str) -> bytes:
        if self.decoder_type is DecoderType.BYTE_LEVEL:
            try:
                return token.translate(_BYTE_TABLE).encode("latin-1")
            except UnicodeEncodeError:  # the library takes such a token as text
                return token.encode()
        byte = fallback_byte(token)
        return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])

    def _special_token_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


def fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _make_byte_decoder() -> dict[str, int]:
    """GPT-2's map (Radford et al., 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_DECODER = _make_byte_decoder()


class _ByteTable(dict[int, int]):
    def __missing__(self, key: int) -> int:
        return 0x100  # not a byte


_BYTE_TABLE = _ByteTable({ord(character): byte for character, byte in BYTE_DECODER.items()})


def _make_token_pattern(backend: tokenizers.Tokenizer, token_ids: Iterable[int]) -> re.Pattern[str] | None:
    """The pattern lists the longest tokens first, because a regex takes the first alternative that matches."""
    tokens = [backend.id_to_token(token_id) for token_id in token_ids]
    ordered = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None


def _detect_decoder_type_and_space_strip(backend: tokenizers.Tokenizer) -> tuple[DecoderType, bool]:
    if backend.decoder is None:
        return DecoderType.OTHER, False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderType.BYTE_LEVEL, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        space = steps[0]["pattern"] == {"String": SPACE_MARK} and steps[0]["content"] == " "
        strip = steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        if space and (strip or not steps[3:]):
            return DecoderType.SENTENCE_PIECE, strip
    return DecoderType.OTHER, False


@contextmanager
def _wrap_library_errors(name: str) -> Iterator[None]:
    """The library's errors are plain Exceptions or, on Rust panics, BaseExceptions."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        text = " ".join(str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ").split())[
            :_MAX_ERROR_CHARACTERS
        ]
        raise ModelError(f"model: {name}: cannot read the tokenizer: {text}") from error


def warn_if_added_tokens_load_slowly(content: bytes, name: str) -> None:
    count = content.count(b'"single_word"')  # occurs once for each added token
    if count >= ADDED_TOKENS_WARNING_THRESHOLD:
        seconds = count * _SECONDS_PER_ADDED_TOKEN
        log.warning("%s has %s added tokens: reading them takes about %.0f s", name, f"{count:,}", seconds)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Adds tokens that only tokenizer_config.json lists, and makes tokens with a role special, as transformers does."""
    known = backend.get_added_tokens_decoder()
    listed: dict[int, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    new = [
        tokenizers.AddedToken(**{name: entry[name] for name in ADDED_TOKEN_FIELDS if name in entry})
        for token_id, entry in sorted(listed.items())
        if token_id not in known
    ]
    # Each call takes time in proportion to all added tokens.
    for special, tokens in groupby(new, lambda token: token.special):
        (backend.add_special_tokens if special else backend.add_tokens)(list(tokens))
    roles = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    by_content = {token.content: token for token in known.values()}
    for content in special_tokens.values():
        if content not in roles and backend.token_to_id(content) is not None:
            old = by_content.get(content)
            token = tokenizers.AddedToken(content, special=True, normalized=False)
            if old is not None:
                token = tokenizers.AddedToken(
                    content, special=True, normalized=old.normalized, lstrip=old.lstrip, rstrip=old.rstrip
                )
            backend.add_special_tokens([token])


ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _load_with_transformers(path: Path) -> tokenizers.Tokenizer:
    others = [file for pattern in _CONVERTIBLE_FILES for file in path.glob(pattern)]
    for file in others:
        if (opened := open_if_present(file)) is not None:
            opened.close()
    if not others:
        raise ModelError(f"model: {path.name} has no tokenizer.json and no file that a tokenizer could be made from")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"model: {path.name} has no fast tokenizer (no tokenizer.json, and transformers builds none)")
    return backend
