"""Tokenizers for tests: two made here, and the real ones of ../shared if that folder exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.engine.text.tokenizer import BYTE_DECODER, Tokenizer

SHARED = Path(os.environ.get("QUIRE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
"""Optional files of tests: real tokenizers and chat templates."""
BYTES = [character for character, _ in sorted(BYTE_DECODER.items(), key=lambda item: item[1])]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Named:
    name: str
    tokenizer: Tokenizer


def byte_level_tokenizer(chat_template: str | None = CHATML) -> Named:
    """One token per byte: id 65 is "A"; three special tokens follow, of which 258 ends an answer."""
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|im_start|>", "<|im_end|>"])
    templates = {} if chat_template is None else {"default": chat_template}
    special = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    return Named("bytes", Tokenizer(backend, special_tokens=special, chat_templates=templates))


def pair_tokenizer(*, segments: bool = True) -> Named:
    """One token per byte, with marks around a text and between two, and BERT's token types, which distinguish the
    second text.
    """
    named = byte_level_tokenizer(None)
    second = 1 if segments else 0
    named.tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|bos|>:0 $A:0 <|im_end|>:0",
        pair=f"<|bos|>:0 $A:0 <|im_end|>:0 $B:{second} <|im_end|>:{second}",
        special_tokens=[("<|bos|>", 256), ("<|im_end|>", 258)],
    )
    return named


def sentence_piece_tokenizer() -> Named:
    """Like Llama 2's: a few words, a prepended space, BOS, and byte fallback."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "b", "c", "\u2581a", "ab", "\u2581ab", " "]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *fallback, *words])}
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "ab")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Named("sentence_piece", Tokenizer(backend, special_tokens=special, chat_templates={}))


@cache
def real_tokenizers() -> tuple[Named, ...]:
    """Folders in ../shared with a tokenizer.json; none if the folder is absent."""
    files = sorted((SHARED / "tokenizers").glob("*/tokenizer.json"))
    return tuple(Named(file.parent.name, Tokenizer.from_pretrained(file.parent)) for file in files)


def shared(folder: str) -> Path:
    """A folder of ../shared; skips the test if it is absent."""
    path = SHARED / folder
    if not path.is_dir():
        pytest.skip(f"../shared/{folder} is not there")
    return path
