"""Tests how tokenizers are read from model directories, and the text and bytes of single tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError, InvalidRequest, ModelError
from quire.engine.text.tokenizer import DecoderType, Tokenizer
from tests.texts import byte_level_tokenizer, sentence_piece_tokenizer, shared

SAMPLES = ["Hello world, how are you?", "日本語 😀 émigré\n\tx", "<|im_start|>user\nhi<|im_end|>\n", ""]
SAMPLES += [
    "\r\n \n\n\n",
    "ﬁ\u200b x\u00a0y e\u0301",
    "1234567 def f(x):\n    return x\n",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["minimind", "phi3", "tinyllama", "qwen2.5"])
def test_real_tokenizers_equal_transformers(name: str) -> None:
    path = shared("tokenizers") / name
    from transformers import AutoTokenizer

    original = AutoTokenizer.from_pretrained(str(path))
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.vocab_size == len(original)
    assert tokenizer.bos_token_id == original.bos_token_id
    assert original.eos_token_id in tokenizer.eos_token_ids
    for text in SAMPLES:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special)
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            assert tokenizer.encode_batch([text, text], add_special_tokens=special) == [ids, ids]
            assert tokenizer.decode(ids, skip_special_tokens=special) == original.decode(
                ids, skip_special_tokens=special
            )


def test_byte_level_tokens_have_text_and_bytes() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    assert tokenizer.decoder_type is DecoderType.BYTE_LEVEL
    space, first, *_ = tokenizer.encode(" é")
    assert (tokenizer.id_to_token(space), tokenizer.token_display_text(space), tokenizer.token_bytes(space)) == (
        "Ġ",
        " ",
        b" ",
    )
    assert (tokenizer.token_display_text(first), tokenizer.token_bytes(first)) == ("\\xc3", b"\xc3")
    assert tokenizer.token_display_text(256) == "<|bos|>"
    assert (tokenizer.id_to_token(999), tokenizer.token_display_text(999), tokenizer.token_bytes(999)) == (
        None,
        "",
        b"",
    )


def test_sentence_piece_tokens_have_text_and_bytes() -> None:
    tokenizer = sentence_piece_tokenizer().tokenizer
    assert tokenizer.decoder_type is DecoderType.SENTENCE_PIECE
    bos, word, *euro = tokenizer.encode("ab€")
    assert bos == tokenizer.bos_token_id == 1
    assert (tokenizer.token_display_text(word), tokenizer.token_bytes(word)) == (" ab", b" ab")
    assert [tokenizer.token_bytes(token_id) for token_id in euro] == [b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.token_display_text(euro[0]) == "\\xe2"


def save_tokenizer(path: Path, **files: object) -> Path:
    byte_level_tokenizer().tokenizer.backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_chat_templates_are_read_from_config_json_and_jinja_files(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, tokenizer_config={"chat_template": "from config"})
    assert Tokenizer.from_pretrained(tmp_path).chat_templates == {"default": "from config"}
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    save_tokenizer(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_pretrained(tmp_path).chat_templates == {"default": "one", "tool_use": "two"}
    save_tokenizer(tmp_path, chat_template={"chat_template": "from json"})
    assert Tokenizer.from_pretrained(tmp_path).chat_templates["default"] == "from json"
    (tmp_path / "chat_template.jinja").write_text("from file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("three")
    assert Tokenizer.from_pretrained(tmp_path).chat_templates == {
        "default": "from file",
        "tool_use": "two",
        "rag": "three",
    }


def test_special_tokens_and_eos_ids_come_from_all_files(tmp_path: Path) -> None:
    save_tokenizer(
        tmp_path,
        special_tokens_map={"eos_token": {"content": "<|bos|>"}, "unk_token": "<|bos|>"},
        tokenizer_config={
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {"259": {"content": "<new>", "special": True, "normalized": False}},
        },
        generation_config={"eos_token_id": [7, 258]},
    )
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "unk_token": "<|bos|>"}
    assert tokenizer.eos_token_ids == (7, 258)
    assert tokenizer.encode("<new>") == [259]
    assert 259 in tokenizer.special_token_ids
    assert tokenizer.decode([65, 259]) == "A"


def test_missing_or_unreadable_tokenizer_raises_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        Tokenizer.from_pretrained(tmp_path)


def test_token_without_embedding_is_rejected(tmp_path: Path) -> None:
    """Some models' tokenizers have such tokens; one in a prompt would crash the engine."""
    save_tokenizer(tmp_path, tokenizer_config={"added_tokens_decoder": {"259": {"content": "<new>", "special": True}}})
    tokenizer = Tokenizer.from_pretrained(tmp_path, model_vocab_size=259)
    assert tokenizer.max_token_id == 259
    assert tokenizer.encode("new") == tokenizer.encode_batch(["new"])[0] == [110, 101, 119]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(InvalidRequest, match="has the token '<new>', which the model has no embedding for"):
            encode("a<new>")
    assert Tokenizer.from_pretrained(tmp_path, model_vocab_size=260).encode("<new>") == [259]


def test_added_tokens_keep_ids_in_order(tmp_path: Path) -> None:
    added = {str(259 + i): {"content": f"<{i}>", "special": i % 3 == 0} for i in range(500)}
    save_tokenizer(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("".join(f"<{i}>" for i in range(500))) == list(range(259, 759))
    assert {i for i in range(500) if 259 + i in tokenizer.special_token_ids} == set(range(0, 500, 3))


def test_given_chat_template_replaces_model_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    for template in (str(file), "{{ messages }}"):
        assert Tokenizer.from_pretrained(DEMO_MODEL, template).chat_templates == {"default": "{{ messages }}"}
    with pytest.raises(ConfigError, match=r"chat_template: cannot read nowhere\.jinja: .*No such file"):
        Tokenizer.from_pretrained(DEMO_MODEL, "nowhere.jinja")
