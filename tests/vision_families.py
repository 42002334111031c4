"""Tiny random models of image families, and transformers' answers about images."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.made_once import made_once
from tests.texts import BYTES
from tests.tiny_models import SHAPE

FIRST_ID = 256
"""First id of the special tokens, which follow the bytes."""
_TEXT = {**SHAPE, "max_position_embeddings": 2048, "vocab_size": 288, "eos_token_id": 258}


@dataclass(frozen=True)
class Family:
    """The model's files, and the transformers classes that read them."""

    config: str
    processor: str
    image_processor: str
    text: dict[str, Any]
    vision: dict[str, Any]
    preparing: dict[str, Any]
    image: str
    """Placeholder token of image features."""
    written: str
    """Text of an image in the chat template."""
    outer: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    """Names by which the processor knows special tokens."""
    others: tuple[str, ...] = ()
    """More special tokens."""
    processing: dict[str, Any] = field(default_factory=dict)
    """Arguments of the processor."""

    @property
    def special(self) -> list[str]:
        named = [each for each in self.tokens.values() if each != self.image]
        return ["<|bos|>", "<|im_start|>", "<|im_end|>", self.image, *named, *self.others]

    def token_id(self, token: str) -> int:
        return FIRST_ID + self.special.index(token)

    @property
    def template(self) -> str:
        return (
            "<|bos|>{% for message in messages %}<|im_start|>{{message['role']}}: "
            "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{part['text']}}"
            "{% else %}" + self.written + "{% endif %}{% endfor %}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
        )


_GEMMA4 = {
    **{key: value for key, value in _TEXT.items() if key != "tie_word_embeddings"},
    **{"model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32},
    **{"sliding_window": 24, "use_bidirectional_attention": "vision"},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA4_VISION = {
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 3},
    "position_embedding_size": 640,
}
_GEMMA4_FILES: dict[str, Any] = {
    "processor": "models.gemma4.processing_gemma4.Gemma4Processor",
    "image_processor": "models.gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",
    "preparing": {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_normalize": False},
    **{"image": "<|image|>", "written": "<|image|>", "outer": {"audio_config": None, "tie_word_embeddings": True}},
    "processing": {"feature_extractor": None, "video_processor": None},
    "tokens": {
        **{"image_token": "<|image|>", "boi_token": "<|boi|>", "eoi_token": "<|eoi|>"},
        **{"boa_token": "<|boa|>", "eoa_token": "<|eoa|>", "audio_token": "<|audio|>", "video_token": "<|video|>"},
    },
}
_QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_PREPARING = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 64, "longest_edge": 60 * 64},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN: dict[str, Any] = {
    "preparing": _QWEN_PREPARING,
    "image": "<|image_pad|>",
    "written": "<|vision_start|><|image_pad|><|vision_end|>",
    "tokens": _QWEN_TOKENS,
    "others": ("<|vision_start|>", "<|vision_end|>"),
    "image_processor": "models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

FAMILIES = {
    "gemma3": Family(
        config="Gemma3Config",
        processor="models.gemma3.processing_gemma3.Gemma3Processor",
        image_processor="models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        text={
            **{key: value for key, value in _TEXT.items() if key != "tie_word_embeddings"},
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision={
            "model_type": "siglip_vision_model",
            **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
            **{"image_size": 48, "patch_size": 6, "vision_use_head": False},
        },
        preparing={"size": {"height": 48, "width": 48}, "resample": 2},
        image="<image_soft_token>",
        written="<start_of_image>",
        outer={"mm_tokens_per_image": 16, "tie_word_embeddings": True},
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        processing={"image_seq_length": 16},
    ),
    "gemma4": Family(
        config="Gemma4Config",
        text={
            **_GEMMA4,
            **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        },
        vision=_GEMMA4_VISION,
        **_GEMMA4_FILES,
    ),
    "gemma4 of 2 B": Family(
        config="Gemma4Config",
        text={
            **{**_GEMMA4, "use_bidirectional_attention": None, "num_kv_shared_layers": 2},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 288},
        },
        vision={**_GEMMA4_VISION, "use_clipped_linears": True, "standardize": True, "num_key_value_heads": 2},
        **_GEMMA4_FILES,
    ),
    "qwen2_vl": Family(
        config="Qwen2VLConfig",
        processor="models.qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
        text={**_TEXT, "rope_parameters": _MROPE},
        vision={**_QWEN_VISION, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
        **_QWEN,
    ),
    "qwen2_5_vl": Family(
        config="Qwen2_5_VLConfig",
        processor="models.qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
        text={**_TEXT, "rope_parameters": _MROPE},
        vision={
            **_QWEN_VISION,
            **{"hidden_size": 48, "intermediate_size": 96, "out_hidden_size": 64},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
        },
        **_QWEN,
    ),
}


FAMILIES |= {
    "qwen3_vl": Family(
        config="Qwen3VLConfig",
        processor="models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        text={
            **{**_TEXT, "num_hidden_layers": 4, "head_dim": 16},
            "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision={
            **_QWEN_VISION,
            **{"hidden_size": 48, "intermediate_size": 96, "out_hidden_size": 64},
            **{"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        },
        **_QWEN,
    ),
    "qwen3_5": Family(
        config="Qwen3_5Config",
        processor="models.qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
        text={
            **{**_TEXT, "num_hidden_layers": 4, "head_dim": 32, "model_type": "qwen3_5_text"},
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
            "rope_parameters": {
                **{**_MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
                "partial_rotary_factor": 0.25,
            },
        },
        vision={
            **_QWEN_VISION,
            **{"hidden_size": 48, "intermediate_size": 96, "out_hidden_size": 64, "num_position_embeddings": 25},
        },
        **_QWEN,
    ),
}


FAMILIES |= {
    "qwen3_vl_moe": replace(
        FAMILIES["qwen3_vl"],
        config="Qwen3VLMoeConfig",
        text={
            **{**FAMILIES["qwen3_vl"].text, "moe_intermediate_size": 48},
            **{"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        },
    ),
    "qwen3_5_moe": replace(
        FAMILIES["qwen3_5"],
        config="Qwen3_5MoeConfig",
        text={
            **{**FAMILIES["qwen3_5"].text, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 48},
            **{"shared_expert_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
        },
    ),
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 24, "patch_size": 4, "vision_use_head": False},
}
_CLIP = {
    "model_type": "clip_vision_model",
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3},
    **{"image_size": 24, "patch_size": 4, "projection_dim": 32},
}
_PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
_LLAVA: dict[str, Any] = {
    "config": "LlavaConfig",
    "processor": "models.llava.processing_llava.LlavaProcessor",
    **{"image": "<image>", "written": "<image>", "tokens": {"image_token": "<image>"}},
}

FAMILIES |= {
    "llava": Family(
        image_processor="models.clip.image_processing_pil_clip.CLIPImageProcessorPil",
        text={**_TEXT, "model_type": "llama"},
        vision=_CLIP,
        preparing={"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 3},
        processing={**{"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}},
        **_LLAVA,
    ),
    "llava of siglip": Family(
        image_processor="models.siglip.image_processing_pil_siglip.SiglipImageProcessorPil",
        text={**_TEXT, "model_type": "qwen2"},
        vision=_SIGLIP,
        preparing={"size": {"height": 24, "width": 24}, "resample": 3},
        processing={"patch_size": 4, "vision_feature_select_strategy": "full"},
        outer={"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        **_LLAVA,
    ),
    "llava_next": Family(
        config="LlavaNextConfig",
        processor="models.llava_next.processing_llava_next.LlavaNextProcessor",
        image_processor="models.llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        text={**_TEXT, "model_type": "mistral", "sliding_window": None},
        vision=_CLIP,
        preparing={
            **{"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "resample": 3},
            "image_grid_pinpoints": _PINPOINTS,
        },
        image="<image>",
        written="<image>",
        tokens={"image_token": "<image>"},
        processing={**{"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}},
        outer={"image_grid_pinpoints": _PINPOINTS},
    ),
    "llava_onevision": Family(
        config="LlavaOnevisionConfig",
        processor="models.llava_onevision.processing_llava_onevision.LlavaOnevisionProcessor",
        image_processor="models.llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
        text={**_TEXT, "model_type": "qwen2"},
        vision=_SIGLIP,
        preparing={"size": {"height": 24, "width": 24}, "resample": 3, "image_grid_pinpoints": _PINPOINTS},
        image="<image>",
        written="<image>",
        tokens={"image_token": "<image>"},
        processing={
            **{"num_image_tokens": 36, "vision_feature_select_strategy": "full"},
            "vision_aspect_ratio": "anyres_max_2",
        },
        outer={"image_grid_pinpoints": _PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
    ),
}


_PIXTRAL: dict[str, Any] = {
    "processor": "models.pixtral.processing_pixtral.PixtralProcessor",
    "image_processor": "models.pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
    "text": {**_TEXT, "model_type": "mistral", "sliding_window": None},
    "vision": {
        "model_type": "pixtral",
        **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
        **{"image_size": 64, "patch_size": 4},
    },
    **{"image": "[IMG]", "written": "[IMG]", "tokens": {"image_token": "[IMG]"}},
    "others": ("[IMG_BREAK]", "[IMG_END]"),
}

FAMILIES |= {
    "mistral3": Family(
        config="Mistral3Config",
        preparing={"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}, "resample": 3},
        processing={"patch_size": 4, "spatial_merge_size": 2},
        outer={"tie_word_embeddings": False},
        **_PIXTRAL,
    ),
    "pixtral": Family(
        config="LlavaConfig",
        preparing={"size": {"longest_edge": 64}, "patch_size": {"height": 4, "width": 4}, "resample": 3},
        processing={"patch_size": 4, "spatial_merge_size": 1},
        outer={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        **_PIXTRAL,
    ),
}


_INTERNVL_VISION = {
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"image_size": [24, 24], "patch_size": [4, 4], "attention_bias": True},
}
_INTERNVL: dict[str, Any] = {
    "config": "InternVLConfig",
    "processor": "models.internvl.processing_internvl.InternVLProcessor",
    "image_processor": "models.got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
    "preparing": {"size": {"height": 24, "width": 24}, "max_patches": 4, "resample": 3, "crop_to_patches": True},
    "image": "<IMG_CONTEXT>",
    "written": "<IMG_CONTEXT>\n",
    "outer": {"tie_word_embeddings": False},
    "tokens": {
        **{"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
        "video_token": "<video>",
    },
    "processing": {"image_seq_length": 9},
}

FAMILIES |= {
    "internvl": Family(text={**_TEXT, "model_type": "qwen2"}, vision=_INTERNVL_VISION, **_INTERNVL),
    "internvl of 6 B": Family(
        text={**_TEXT, "model_type": "qwen2"},
        vision={**_INTERNVL_VISION, "attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"},
        **_INTERNVL,
    ),
}


def named(path: str) -> Any:
    """A class of transformers."""
    found: Any = transformers
    if "pixtral" in path:  # its processor takes a function from a file that needs torchvision, and also from this one
        pillow = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pillow)
    module, _, name = path.rpartition(".")
    if module:
        found = import_module(f"transformers.{module}")
    return getattr(found, name)


def config_of(name: str, **overrides: Any) -> Any:
    """transformers' configuration. `overrides` change the text part."""
    family = FAMILIES[name]
    ids = {key.replace("_token", "_token_id"): family.token_id(token) for key, token in family.tokens.items()}
    if "boi_token" in family.tokens and "boa_token" not in family.tokens:
        ids = {key.replace("_token", "_token_index"): family.token_id(token) for key, token in family.tokens.items()}
    text, vision = {**family.text, **overrides}, dict(family.vision)
    if "context_image_token" in family.tokens:
        ids = {"image_token_id": family.token_id(family.image)}
    return named(family.config)(text_config=text, vision_config=vision, **ids, **family.outer)


def save_family(path: Path, name: str, **overrides: Any) -> Path:
    """Write model, tokenizer and template to `path`. The tokenizer has one token per byte and the family's special
    tokens. `overrides` change the text part of config.json.
    """
    return made_once(path, partial(_save_family, name=name, **overrides), FAMILIES[name], overrides)


def _save_family(path: Path, name: str, **overrides: Any) -> None:
    family, config = FAMILIES[name], config_of(name, **overrides)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            table = "embed_tokens" in key or "position" in key or "pos_embed" in key
            torch.nn.init.normal_(parameter, std=0.5 if table else 1.5 * parameter[0].numel() ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in key else 1.0, std=0.2)
    for key, buffer in model.named_buffers():  # Gemma 4's
        if key.endswith(("put_min", "put_max")):
            buffer.fill_((1.0 if key.endswith("max") else -1.2) * (0.7 if "v_proj" in key else 1.0))
        elif key.endswith(("std_bias", "std_scale", "layer_scalar")):
            torch.nn.init.normal_(buffer, mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
    model.save_pretrained(path)
    if name == "qwen3_vl_moe":  # the published layout: a column for each output
        stored = load_file(path / "model.safetensors")
        turned = {key: each.transpose(1, 2).contiguous() for key, each in stored.items() if ".experts." in key}
        save_file(stored | turned, path / "model.safetensors", metadata={"format": "pt"})
    (path / "preprocessor_config.json").write_text(json.dumps(family.preparing))
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(family.special)
    backend.save(str(path / "tokenizer.json"))
    told = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": family.template}
    (path / "tokenizer_config.json").write_text(json.dumps(told))


def image_processor(name: str) -> Any:
    """The Pillow backend of transformers with the family's settings."""
    family = FAMILIES[name]
    return named(family.image_processor)(**family.preparing)


def expected(
    path: Path,
    name: str,
    talk: list[dict[str, Any]],
    images: list[Image.Image],
    answer: list[int],
    dtype: torch.dtype = torch.float64,
) -> tuple[list[int], torch.Tensor]:
    """Prompt ids of transformers, and logprobs [tokens, vocab] at every position of prompt and answer, computed in
    `dtype`.
    """
    inputs = prepared(path, name, talk, images)
    ids = inputs.pop("input_ids")[0].tolist()
    inputs.pop("attention_mask")
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in inputs:
            more = torch.zeros(1, len(answer), dtype=torch.long)
            inputs[key] = torch.cat((torch.as_tensor(inputs[key]), more), dim=1)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    with torch.inference_mode():
        given = {key: each.to(dtype) if each.is_floating_point() else each for key, each in inputs.items()}
        found = model(input_ids=torch.tensor([ids + answer]), **given)
    return ids, found.logits[0].double().log_softmax(-1)


def vector(path: Path, name: str, talk: list[dict[str, Any]], images: list[Image.Image]) -> torch.Tensor:
    """Hidden state of a conversation's last token after the final norm, scaled to length 1, from transformers."""
    inputs = prepared(path, name, talk, images, asks=False)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64)
    wide = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    with torch.inference_mode():
        hidden = model.model(**wide).last_hidden_state[0, -1]
    return hidden / hidden.norm()


def prepared(
    path: Path, name: str, talk: list[dict[str, Any]], images: list[Image.Image], *, asks: bool = True
) -> dict[str, torch.Tensor]:
    """Inputs that transformers' processor makes of a conversation; `asks` adds the generation prompt."""
    family = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=family.tokens)
    kind = named(family.processor)  # its check would import video processors, which need torchvision
    made = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})(
        image_processor=image_processor(name), tokenizer=tokenizer, chat_template=family.template, **family.processing
    )
    text = made.apply_chat_template(talk, add_generation_prompt=asks)
    shown = {"images": [images]} if images else {}
    found = made(text=[text], **shown, return_tensors="pt", add_special_tokens=False, padding=False)
    return {key: torch.as_tensor(each) for key, each in found.items()}
