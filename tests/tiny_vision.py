"""A tiny random SmolVLM, and transformers' answers about images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast, SmolVLMConfig

from tests.made_once import made_once
from tests.texts import BYTES
from tests.tiny_models import SHAPE

MARK, MARK_ID = "<image>", 259
TILE, LONGEST, TILE_TOKENS = 40, 80, 16
ROWS = 4
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's chat template."""
PREPARING = {
    "do_image_splitting": True,
    "size": {"longest_edge": LONGEST},
    "max_image_size": {"longest_edge": TILE},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "resample": 1,
}


def save_tiny_vision(path: Path, **overrides: Any) -> Path:
    """Write model, tokenizer and template to `path`. Its tokens are single bytes and SmolVLM's special tokens."""
    return made_once(path, partial(_save_tiny_vision, **overrides), "tiny vision", overrides)


def _save_tiny_vision(path: Path, **overrides: Any) -> None:
    torch.manual_seed(5)
    tower = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = SmolVLMConfig(
        text_config={**SHAPE, "model_type": "llama", "eos_token_id": 258, **overrides},
        vision_config={**tower, "image_size": TILE, "patch_size": 5},
        scale_factor=2,
        image_token_id=MARK_ID,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            table = "embed_tokens" in name or "position_embedding" in name
            torch.nn.init.normal_(parameter, std=0.5 if table else 1.5 * parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPARING))
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rows = [f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)]
    marks = ["<|bos|>", "<|im_start|>", "<end_of_utterance>", MARK, "<fake_token_around_image>", "<global-img>"]
    backend.add_special_tokens([*marks, *rows])
    backend.save(str(path / "tokenizer.json"))
    told = {"bos_token": "<|bos|>", "eos_token": "<end_of_utterance>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(told))


def picture(seed: int, width: int, height: int) -> Image.Image:
    """An image of colored blocks."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def processor(path: Path) -> Any:
    """The processor of transformers, with its Pillow backend."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), eos_token="<end_of_utterance>")
    images = Idefics3ImageProcessorPil(**PREPARING)
    return Idefics3Processor(images, tokenizer, image_seq_len=TILE_TOKENS, chat_template=TEMPLATE)


def expected(
    path: Path, talk: list[dict[str, Any]], images: list[Image.Image], answer: list[int]
) -> tuple[list[int], torch.Tensor]:
    """Prompt ids of transformers, and logprobs [tokens, vocab] at every position of prompt and answer."""
    made = processor(path)
    text = made.apply_chat_template(talk, add_generation_prompt=True)
    inputs = made(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    ids = inputs["input_ids"][0].tolist()
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        found = model(
            input_ids=torch.tensor([ids + answer]),
            pixel_values=inputs["pixel_values"],
            pixel_attention_mask=inputs["pixel_attention_mask"],
        )
    return ids, found.logits[0].log_softmax(-1)
