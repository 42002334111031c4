"""A tiny model with one token per byte. Its weights do not matter, because the scripted answers are forced."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.server.scripted import EOS, TEMPLATE
from tests.texts import byte_level_tokenizer
from tests.tiny_models import SHAPE

CONTEXT = 400_000
CHAT_TEMPLATE = TEMPLATE.replace("%}<tool_call>\n{", "%}{{ '\\n' }}<tool_call>\n{")
"""A call begins on its own line, as in Qwen's templates."""


def save_scripted_model(folder: Path) -> None:
    """The model has one layer and one narrow head, so that attention over 100,000 tokens takes only seconds."""
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16}
    config = AutoConfig.for_model(
        "llama", **{**SHAPE, **small, "max_position_embeddings": CONTEXT, "eos_token_id": EOS, "bos_token_id": None}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_level_tokenizer().tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
