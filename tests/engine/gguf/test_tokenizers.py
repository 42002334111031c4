"""Tokenizers built from GGUF metadata against the models' own files, and against llama.cpp's pre-tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.engine.common.errors import ModelError
from quire.engine.gguf.header import read_header
from quire.engine.gguf.hf_tokenizer import eos_token_ids
from quire.engine.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.engine.text.tokenizer import Tokenizer
from tests.gguf_models import gguf
from tests.texts import shared

TEXTS = (
    "Hello world, it's 2026! We've 12345 numbers, 3.14159; I'LL don't.",
    "   leading spaces\ttabs\t\tdouble\n\n\nnewlines   and trailing   \n",
    "def f(x_1, y2): return x_1**2 + y2//3 != 0  # comment `code` <b>$5 ~ ^ |</b>",
    "Ünïcödé façade Straße привет мир 你好世界 こんにちは 한국어 السلام עברית हिन्दी ไทย",
    "😀👍🏽 👨‍👩‍👧 ½ ² Ⅷ ٣٤٥ “quotes” — dash … 「括弧」 \u0000 \ufffd",
    "camelCase ALLCAPS mixedCASE XMLHttpRequest snake_case http://example.com/a?b=c&d=e#f",
    "<s>special</s> tokens <|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
    " ",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, kind: str, tokens: list[str], types: list[int], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_sentencepiece_pieces(model: bytes) -> list[tuple[str, float, int]]:
    """Text, score and type of each piece of a SentencePiece model. The model is a protobuf message: repeated field 1,
    with the fields 1 (text), 2 (float score) and 3 (type, 1 if absent).
    """
    import struct

    def varint(data: bytes, at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if not data[at - 1] & 128:
                return value, at

    result, at = [], 0
    while at < len(model):
        tag, at = varint(model, at)
        length, at = varint(model, at)
        if tag == 10:
            text, score, kind, inner, end = "", 0.0, 1, at, at + length
            while inner < end:
                field, inner = varint(model, inner)
                if field == 10:
                    size, inner = varint(model, inner)
                    text, inner = model[inner : inner + size].decode(), inner + size
                elif field == 21:
                    (score,), inner = struct.unpack_from("<f", model, inner), inner + 4
                else:
                    kind, inner = varint(model, inner)
            result.append((text, score, kind))
        at += length
    return result


def test_gguf_sentencepiece_tokenizer_equals_original(tmp_path: Path) -> None:
    folder = shared("tokenizers") / "tinyllama"
    texts, scores, types = (
        list(column)
        for column in zip(*read_sentencepiece_pieces((folder / "tokenizer.model").read_bytes()), strict=True)
    )
    file = write(
        *(tmp_path / "t.gguf", "llama", texts, types),
        **{"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    )
    tokenizer, original = Tokenizer.from_pretrained(file), Tokenizer.from_pretrained(folder)
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    for text in TEXTS:
        ids = original.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == original.decode(ids)
    assert [tokenizer.token_bytes(i) for i in range(1000)] == [original.token_bytes(i) for i in range(1000)]
    corpus = shared("corpus")
    story = next(iter(sorted(corpus.glob("*.txt")))).read_text()[:100_000]
    assert tokenizer.encode(story) == original.encode(story)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pre"), [("qwen2.5", "qwen2"), ("minimind", "gpt-2")])
def test_gguf_byte_level_tokenizer_equals_original(name: str, pre: str, tmp_path: Path) -> None:
    original = Tokenizer.from_pretrained(shared("tokenizers") / name)
    state = json.loads(original.backend.to_str())
    ids = original.backend.get_vocab(with_added_tokens=True)
    added = {token["id"]: token["special"] for token in state["added_tokens"]}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    types = [
        NORMAL if index not in added else CONTROL if added[index] else USER_DEFINED for index in range(len(tokens))
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    file = write(tmp_path / "t.gguf", "gpt2", tokens, types, merges=merges, pre=pre)
    tokenizer = Tokenizer.from_pretrained(file)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.special_token_ids == original.special_token_ids


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_round_trips_text(name: str, tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    file = write(tmp_path / "t.gguf", "gpt2", alphabet, [NORMAL] * 256, pre=name)
    tokenizer = Tokenizer.from_pretrained(file)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "text", "cuts"),
    [
        ("llama-bpe", "I'LL pay 12345", ["I", "'LL", "Ġpay", "Ġ", "123", "45"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3"]),
        ("qwen35", "I'LL pay 123", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3"]),
        ("smollm", "I'll pay 12!", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "!"]),
        ("gpt-2", "I'LL pay 123", ["I", "'", "LL", "Ġpay", "Ġ123"]),
        ("tekken", "CamelCASE 12", ["Camel", "CASE", "Ġ", "1", "2"]),
        ("gpt-4o", "I'LL CamelCASE 1234/\n", ["I'LL", "ĠCamel", "CASE", "Ġ", "123", "4", "/Ċ"]),
        ("default", "a 1234.", ["a", "Ġ", "123", "4", "."]),
    ],
)
def test_pre_tokenizer_splits_text_like_llama_cpp(name: str, text: str, cuts: list[str], tmp_path: Path) -> None:
    """The pieces are those of llama.cpp's regular expressions of that name."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    file = write(tmp_path / "t.gguf", "gpt2", alphabet, [NORMAL] * 256, pre=name)
    backend = Tokenizer.from_pretrained(file).backend
    assert backend.pre_tokenizer is not None
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == cuts


def test_gguf_tokenizer_adds_bos_and_eos_by_metadata(tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens, types = ["<b>", "<e>", *alphabet], [CONTROL, CONTROL, *[NORMAL] * 256]
    roles = {"bos_token_id": 0, "eos_token_id": 1, "eot_token_id": 1}

    def around(pre: str, **flags: bool) -> list[int]:
        ids = Tokenizer.from_pretrained(
            write(tmp_path / "t.gguf", "gpt2", tokens, types, pre=pre, **roles, **flags)
        ).encode("a")
        return [token for token in ids if token < 2]

    assert around("gpt-2") == []
    assert around("llama-bpe") == [0]
    assert around("llama-bpe", add_bos_token=False) == []
    assert around("gpt-2", add_bos_token=True, add_eos_token=True) == [0, 1]


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>"], ["<|return|>", "<|call|>"]),  # gpt-oss: one message's end
        (["<|end|>", "<|start|>"], ["<|end|>"]),  # Phi: an answer's
    ],
)
def test_gguf_eos_token_ids_depend_on_end_tokens_of_family(names: list[str], ends: list[str], tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    types = [CONTROL] * len(names) + [NORMAL] * 256
    header = read_header(write(tmp_path / "t.gguf", "gpt2", [*names, *alphabet], types, pre="gpt-4o"))
    assert [names[index] for index in eos_token_ids(header)] == ends


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
def test_known_eos_tokens_are_special_for_any_token_type(tmp_path: Path, kind: int) -> None:
    """Converters give `<|im_end|>` the type normal or user-defined; llama.cpp overrides that, with a warning."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens, types = ["<|endoftext|>", "<|im_end|>", *alphabet], [CONTROL, kind] + [NORMAL] * 256
    path = write(tmp_path / "t.gguf", "gpt2", tokens, types, pre="qwen2", eos_token_id=0)
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.eos_token_ids == (0, 1)
    assert tokenizer.encode("a<|im_end|>")[-1] == 1
    assert tokenizer.decode([2, 1]) == tokenizer.decode([2])


def test_eos_token_is_inferred_from_gguf_chat_template(tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens, types = ["<s>", "<turn|>", *alphabet], [CONTROL, CONTROL] + [NORMAL] * 256
    template = "{% for m in messages %}<s>{{ m.content }}<turn|>\n{% endfor %}"
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert Tokenizer.from_pretrained(tmp_path / "t.gguf").eos_token_ids == (1,)


def test_gguf_chat_templates_keep_their_names(tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(alphabet)
    writer.add_chat_template([{"name": "default", "template": "one"}, {"name": "rag", "template": "two"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert Tokenizer.from_pretrained(tmp_path / "t.gguf").chat_templates == {"default": "one", "rag": "two"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"kind": "bert"}, "tokenizer.ggml.model"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"merges": ["a zz"]}, "tokenizer"),
        ({"types": [1]}, "tokenizer.ggml.token_type"),
        ({"tokens": ["a", "a"], "types": [1, 1]}, "tokenizer.ggml.tokens"),
        ({"tokens": [], "types": []}, "has no tokenizer"),
        ({"kind": "llama", "scores": [0.5]}, "tokenizer.ggml.scores"),
        ({"add_bos_token": "yes", "bos_token_id": 0}, "tokenizer.ggml.add_bos_token"),
    ],
)
def test_invalid_gguf_tokenizer_field_is_named_in_error(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"kind": "gpt2", "tokens": ["a", "b", "ab"], "types": [1, 1, 1], "merges": ["a b"]}
    with pytest.raises(ModelError, match=says) as caught:
        Tokenizer.from_pretrained(write(tmp_path / "t.gguf", **parts | changed))
    assert "\n" not in str(caught.value)


def test_gguf_tokenizer_rejects_overlong_tokens(tmp_path: Path) -> None:
    tokens = ["<unk>", "x" * 100_000]
    file = write(tmp_path / "t.gguf", "llama", tokens, [UNKNOWN, NORMAL], scores=[0.0, -1.0])
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens: are too long"):
        Tokenizer.from_pretrained(file)
