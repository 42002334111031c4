"""Tests that the engine, beam search, grammars and drafters share one set of EOS token ids (issue 58)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.overrides import load_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.gguf.model_files import ModelFiles
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.text.tokenizer_files import read_eos_token_ids
from tests import tiny_models
from tests.texts import BYTES, CHATML, shared

EOS, TURN, THIRD = 256, 257, 258
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
)
ALWAYS_END = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
THOUGHTS = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}{{ m.reasoning_content }}<|end|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
)


def save_tokenizer_folder(
    folder: Path, *, added: tuple[str, ...], template: str | None = None, **files: object
) -> Path:
    """A folder with a byte-level tokenizer and the special tokens `added` from id 256 on; `files` are JSON by file
    stem.
    """
    folder.mkdir(exist_ok=True)
    tokens = [{"id": 256 + index, "content": token, "special": True} for index, token in enumerate(added)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [token | flags for token in tokens],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(BYTES)}, "merges": []},
    }
    config = {"model_type": "llama"} | tiny_models.SHAPE
    defaults = {"tokenizer": content, "config": {**config, "eos_token_id": None}, "tokenizer_config": {}}
    for stem, value in (defaults | files).items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def eos_token_ids(folder: Path) -> set[int]:
    """The EOS ids of the model configuration; asserts that the tokenizer has the same."""
    eos_ids = read_model_config(folder).eos_token_ids
    assert Tokenizer.from_pretrained(folder).eos_token_ids == eos_ids
    return set(eos_ids)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"model_type": "llama"} | tiny_models.SHAPE}, {2}),
        ({"generation_config": {"eos_token_id": [2, EOS]}}, {2, EOS}),
        ({"generation_config": {"eos_token_id": None}}, set()),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, {TURN}),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, {TURN}),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, {TURN}),
        ({"tokenizer_config": {"eos_token": "A"}}, {65}),
        ({"tokenizer_config": {"eos_token": "<absent>"}}, set()),
    ],
)
def test_eos_ids_are_read_from_every_config_file(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    folder = save_tokenizer_folder(tmp_path, added=("<|endoftext|>", "<|im_end|>"), **files)
    assert eos_token_ids(folder) == expected


def test_eos_ids_of_outer_and_text_config_are_joined(tmp_path: Path) -> None:
    """Gemma 3's config.json names the end of a turn outside text_config, and the end of a text inside."""
    inner = {"model_type": "gemma3_text", **tiny_models.SHAPE, "eos_token_id": 1, "head_dim": 16, "sliding_window": 64}
    outer = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]}
    assert eos_token_ids(save_tokenizer_folder(tmp_path, added=(), config=outer)) == {1, 106}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, {TURN}),
        (CHATML.replace("<|im_end|>", ""), set()),
        (CHATML.replace("<|im_end|>", " <|im_end|>"), set()),
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}", set()),
        ("{% for m in messages %}{% if m.role == 'user' %}<|im_end|>{% endif %}{{ m.content }}{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}<|im_end|><|endoftext|>{% endfor %}", {TURN}),
        ("{{ broken", set()),
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_end_of_turn_token_is_found_in_chat_template(tmp_path: Path, template: str, expected: set[int]) -> None:
    folder = save_tokenizer_folder(tmp_path, added=("<|endoftext|>", "<|im_end|>"), template=template)
    assert set(read_model_config(folder).eos_token_ids) == expected


def test_template_token_before_known_eos_is_not_eos(tmp_path: Path) -> None:
    """Cohere's answers end with `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`."""
    template = "{% for m in messages %}{{ m.content }}<|im_end|><|endoftext|>{% endfor %}"
    known = {"tokenizer_config": {"eos_token": "<|endoftext|>"}}
    assert eos_token_ids(
        save_tokenizer_folder(tmp_path, added=("<|endoftext|>", "<|im_end|>"), template=template, **known)
    ) == {EOS}


@pytest.mark.parametrize("template", [HARMONY, ALWAYS_END, THOUGHTS])
def test_channel_end_token_is_not_eos(tmp_path: Path, template: str) -> None:
    """gpt-oss ends every channel's message with `<|end|>` and continues with the next channel."""
    added = ("<|return|>", "<|end|>", "<|call|>")
    files = {"tokenizer_config": {"eos_token": "<|return|>"}}
    assert eos_token_ids(save_tokenizer_folder(tmp_path, added=added, template=template, **files)) == {EOS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen3-0.6B", "<|im_end|>"),
        ("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>"),
        ("google-gemma-2-2b-it", "<end_of_turn>"),
        ("microsoft-Phi-3.5-mini-instruct", "<|end|>"),
        ("GLM-4.7-Flash", None),
        ("upstage-Solar-Open-100B", None),
        ("GigaChat3-10B-A1.8B", None),
        ("Kimi-K3", None),
    ],
)
def test_end_of_turn_token_of_published_templates(tmp_path: Path, name: str, expected: str | None) -> None:
    template = (shared("templates") / f"{name}.jinja").read_text()
    marks = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|message_sep|>", "<|user|>", "<|close|>")
    folder = save_tokenizer_folder(tmp_path, added=marks, template=template)
    assert eos_token_ids(folder) == (set() if expected is None else {256 + marks.index(expected)})


def test_eos_ids_include_configured_tokenizer_and_chat_template(tmp_path: Path) -> None:
    model = save_tokenizer_folder(tmp_path / "model", added=("<|endoftext|>",), generation_config={"eos_token_id": 2})
    other = save_tokenizer_folder(
        tmp_path / "tokenizer", added=("<a>", "<|im_end|>"), tokenizer_config={"eos_token": "<a>"}
    )
    config = EngineConfig(model=str(model), tokenizer=str(other), chat_template=CHATML)
    assert load_model_config(config, model).eos_token_ids == (2, EOS, TURN)
    assert read_eos_token_ids(ModelFiles(model)) == (2,)


def test_eos_ids_outside_vocabulary_are_dropped(tmp_path: Path) -> None:
    folder = save_tokenizer_folder(
        tmp_path, added=("<|endoftext|>",), generation_config={"eos_token_id": [2, -1, EOS, 1000]}
    )
    assert read_eos_token_ids(ModelFiles(folder)) == (2, -1, EOS, 1000)
    assert read_eos_token_ids(ModelFiles(folder), 300) == (2, EOS)
    assert Tokenizer.from_pretrained(folder, model_vocab_size=300).eos_token_ids == (2, EOS)
