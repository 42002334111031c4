"""Converts GGUF metadata to tokenizer files. "gpt2" is byte-level BPE with merges, "llama" is SentencePiece BPE with
scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.gguf.header import GGUFHeader
from quire.engine.gguf.pre_tokenizers import PRE_TOKENIZERS

_PREFIX = "tokenizer.ggml."
# Values of token_type; bytes have 6.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_ADDED_TYPES = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE_MARK = "\u2581"
_SPECIAL_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
_ROLE_KEYS = {"unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id"}
"""`seperator` is GGUF's own spelling."""
HARMONY_END_TOKENS = {"<|return|>", "<|call|>"}
"""If a vocabulary has both tokens, <|end|> ends only a message, not the answer (OpenAI's harmony format)."""
_END_TOKENS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    *HARMONY_END_TOKENS,
}
"""Files name one or two of these tokens as ends, and may mark others as normal tokens."""
_CHAT_TEMPLATE_KEY = "tokenizer.chat_template"
_MAX_SPLIT_CHARACTERS = 2**28
"""Bounds the characters in all splits of SentencePiece tokens. Gemma has about 2**25."""


def tokenizer_json(header: GGUFHeader) -> dict[str, Any]:
    """Raises ModelError naming the wrong key."""
    tokens, types = _tokens_and_types(header)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    if len(vocabulary) + types.count(_UNUSED) != len(tokens):
        raise _key_error(header, "tokens", "some appear twice")
    kind = header.get_string(f"{_PREFIX}model")
    if kind == "gpt2":
        parts, adds_bos = _byte_level_fields_and_bos_flag(header, vocabulary)
    elif kind == "llama":
        parts, adds_bos = _sentence_piece_fields(header, vocabulary, types), True
    else:
        raise _key_error(header, "model", f"tokenizers of type {str(kind)[:40]!r} are not supported (gpt2, llama)")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[index] != _USER_DEFINED,
        }
        for index, token in enumerate(tokens)
        if types[index] in _ADDED_TYPES
    ]
    post_processor = _post_processor(header, tokens, adds_bos)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts | post_processor


def tokenizer_config_json(header: GGUFHeader) -> dict[str, Any]:
    tokens, _ = _tokens_and_types(header)
    special_tokens: dict[str, Any] = {
        f"{role}_token": tokens[index]
        for role in _SPECIAL_ROLES
        if (index := _role_token_id(header, role, len(tokens))) is not None
    }
    named = [
        {"name": key.removeprefix(f"{_CHAT_TEMPLATE_KEY}."), "template": header.get_string(key) or ""}
        for key in header.metadata
        if key.startswith(f"{_CHAT_TEMPLATE_KEY}.")
    ]
    if (usual := header.get_string(_CHAT_TEMPLATE_KEY)) is not None:
        named.append({"name": "default", "template": usual})
    return special_tokens | ({"chat_template": named} if named else {})


def eos_token_ids(header: GGUFHeader) -> list[int]:
    tokens, _ = _tokens_and_types(header)
    named = [_role_token_id(header, role, len(tokens)) for role in ("eos", "eot", "eom")]
    return list(dict.fromkeys([*(index for index in named if index is not None), *_known_end_token_ids(tokens)]))


def _known_end_token_ids(tokens: Sequence[str]) -> list[int]:
    end_tokens = _END_TOKENS - {"<|end|>"} if HARMONY_END_TOKENS.issubset(tokens) else _END_TOKENS
    return [index for index, token in enumerate(tokens) if token in end_tokens]


def added_tokens_json(header: GGUFHeader) -> dict[str, int]:
    tokens, types = _tokens_and_types(header)
    return {token: index for index, token in enumerate(tokens) if types[index] in _ADDED_TYPES}


def tokenizer_vocab_size(header: GGUFHeader) -> int | None:
    return len(header.get_strings(f"{_PREFIX}tokens")) or None


def _tokens_and_types(header: GGUFHeader) -> tuple[list[str], Sequence[int]]:
    """As in llama.cpp, end tokens become control tokens, so each is one token in prompts and hidden in answers."""
    tokens = header.get_strings(f"{_PREFIX}tokens")
    if not tokens:
        raise ModelError(f"model: {header.name} has no tokenizer ({_PREFIX}tokens)")
    types = header.get_integers(f"{_PREFIX}token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise _key_error(header, "token_type", f"has {len(types)} items for {len(tokens)} tokens")
    types = [*types]
    for index in _known_end_token_ids(tokens):
        if types[index] in (_NORMAL, _USER_DEFINED):
            types[index] = _CONTROL
    return tokens, types


def _role_token_id(header: GGUFHeader, role: str, count: int) -> int | None:
    key = _ROLE_KEYS.get(role, f"{role}_token_id")
    index = header.get_integer(f"{_PREFIX}{key}")
    return index if index is not None and 0 <= index < count else None


def _byte_level_fields_and_bos_flag(header: GGUFHeader, vocabulary: dict[str, int]) -> tuple[dict[str, Any], bool]:
    name = header.get_string(f"{_PREFIX}pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise _key_error(header, "pre", f"{name[:40]!r} is not known ({', '.join(sorted(PRE_TOKENIZERS))})")
    split = PRE_TOKENIZERS[name]
    merges = []
    for merge in header.get_strings(f"{_PREFIX}merges"):
        at = merge.find(" ", 1)  # a token may begin with a space
        if at < 0:
            raise _key_error(header, "merges", f"{merge[:40]!r} is not two tokens")
        merges.append([merge[:at], merge[at + 1 :]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if split.normalizes_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": byte_level,
        "model": _bpe_model(vocabulary, merges, ignore_merges=split.ignore_merges),
    }, split.adds_bos


def _sentence_piece_fields(header: GGUFHeader, vocabulary: dict[str, int], types: Sequence[int]) -> dict[str, Any]:
    scores = header.get_floats(f"{_PREFIX}scores")
    if len(scores) != len(types):
        raise _key_error(header, "scores", f"has {len(scores)} items for {len(types)} tokens")
    prepends = header.get_bool(f"{_PREFIX}add_space_prefix") is not False
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prepends:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE_MARK}, marks]}
    unknown = next((token for token, index in vocabulary.items() if types[index] == _UNKNOWN), None)
    merges = list(_derive_merges(header, vocabulary, types, scores))
    return {
        "normalizer": before if prepends else marks,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe_model(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _derive_merges(
    header: GGUFHeader, vocabulary: dict[str, int], types: Sequence[int], scores: Sequence[float]
) -> Iterator[list[str]]:
    """SentencePiece files have no merges. All pairs of tokens that form a token become merges, highest score first."""
    usual = {token for token, index in vocabulary.items() if types[index] not in (_UNKNOWN, _CONTROL)}
    if sum(len(token) ** 2 for token in usual) > _MAX_SPLIT_CHARACTERS:
        raise _key_error(header, "tokens", "are too long in total to be split into merges")
    ranked = sorted((token for token in usual if len(token) > 1), key=lambda token: -scores[vocabulary[token]])
    for token in ranked:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in usual and pair[1] in usual]
        yield from sorted(([*pair] for pair in known), key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _bpe_model(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    absent = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    usual = {**dict.fromkeys(absent), **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)}
    return {"type": "BPE"} | usual | options | {"vocab": vocabulary, "merges": merges}


def _post_processor(header: GGUFHeader, tokens: Sequence[str], adds_bos: bool) -> dict[str, Any]:
    """`adds_bos` is the default of add_bos_token."""
    adds_bos_in_file = header.get_bool(f"{_PREFIX}add_bos_token")
    before = (
        _role_token_id(header, "bos", len(tokens))
        if (adds_bos if adds_bos_in_file is None else adds_bos_in_file)
        else None
    )
    after = _role_token_id(header, "eos", len(tokens)) if header.get_bool(f"{_PREFIX}add_eos_token") else None
    if before is None and after is None:
        return {"post_processor": None}

    def special_token(index: int | None) -> list[dict[str, Any]]:
        return [] if index is None else [{"SpecialToken": {"id": tokens[index], "type_id": 0}}]

    single = [*special_token(before), {"Sequence": {"id": "A", "type_id": 0}}, *special_token(after)]
    pair = [*single, *special_token(before), {"Sequence": {"id": "B", "type_id": 1}}, *special_token(after)]
    named = {
        tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
        for index in (before, after)
        if index is not None
    }
    return {"post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named}}


def _key_error(header: GGUFHeader, key: str, what: str) -> ModelError:
    return ModelError(f"model: {header.name}: {_PREFIX}{key}: {what}")
