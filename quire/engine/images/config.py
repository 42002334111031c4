"""Reads what a model's files say of images: its tower, its connector, and how an image is prepared for them. No torch.

A family is a line of READERS, and a file beside this one that many share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.folder import checked
from quire.engine.gguf.files import ModelFiles
from quire.engine.images import gemma4, internvl, lfm2, llava, pairs, patches, pixtral, squares, tiles
from quire.engine.images.fields import OuterFields, PreparingFields, ProcessorFields, VisionFields
from quire.engine.images.vision import Given, Vision

READERS: dict[str, Callable[[Given], Vision]] = {
    "clip": pairs.clip,
    "gemma3": squares.gemma3,
    "gemma4": gemma4.gemma4,
    "idefics3": tiles.read,
    "internvl": internvl.read,
    "lfm2_vl": lfm2.read,
    "llava": llava.llava,
    "llava_next": llava.llava_next,
    "llava_onevision": llava.llava_onevision,
    "mistral3": pixtral.mistral3,
    "qwen2_5_vl": patches.qwen2_5_vl,
    "qwen2_vl": patches.qwen2_vl,
    "qwen3_5": patches.qwen3_vl,
    "qwen3_5_moe": patches.qwen3_vl,
    "qwen3_vl": patches.qwen3_vl,
    "qwen3_vl_moe": patches.qwen3_vl,
    "siglip": pairs.siglip,
    "smolvlm": tiles.read,
}
"""By the model_type of those whose images are read."""
_AS_THEY_ARE = ("gemma4",)
"""Those whose pixels may be from 0 to 1."""
KEPT_BYTES = 256 << 20
"""Of images' features that an engine keeps. What was let go of is made again, to the same bits."""


def reads_images(raw: Mapping[str, Any]) -> bool:
    """Whether images are read for a config.json of this kind."""
    return str(raw.get("model_type")) in READERS and raw.get("vision_config") is not None


def read_vision(path: Path, raw: Mapping[str, Any] | None = None) -> Vision | None:
    """What the model at `path` reads of images; None where it reads none. raw: its config.json, where that has another
    name. Raises ModelError, naming a wrong field."""
    files = ModelFiles(path)
    content, label = files.json("config.json") if raw is None else raw, files.label("config.json")
    if content is None or not reads_images(content):
        return None
    preparing = _preparing(files, normalizes=str(content.get("model_type")) not in _AS_THEY_ARE)
    return _vision(content, preparing, label)


def tower_numbers(raw: Mapping[str, Any], text_size: int) -> tuple[int, int]:
    """Parameters of the tower and connector of a config.json, beside a text part whose hidden states have this size,
    and those of them that few bits can hold; 0 where it has none that is read. Raises ModelError, naming a wrong
    field."""
    if not reads_images(raw):
        return 0, 0
    vision = _vision(raw, {}, "config.json", planned=True)
    return vision.numbers(text_size), vision.linear_numbers


def _vision(content: Mapping[str, Any], preparing: PreparingFields, label: str, *, planned: bool = False) -> Vision:
    """What the files say. Raises ModelError."""
    given, text = content.get("vision_config") or {}, content.get("text_config") or {}
    if not isinstance(given, dict):
        raise ModelError(f"model: {label}: vision_config: expected object")
    tower = checked(given, VisionFields, f"{label}: vision_config")
    outer = checked(dict(content), OuterFields, label)
    text = {**content, **(text if isinstance(text, dict) else {})}
    return READERS[str(content.get("model_type"))](Given(tower, outer, preparing, text, label, planned))


def _preparing(files: ModelFiles, *, normalizes: bool) -> PreparingFields:
    """normalizes: the family's pixels must be."""
    name, other = "preprocessor_config.json", "processor_config.json"
    given = files.json(name)
    if given is None:
        processor = checked(files.json(other) or {}, ProcessorFields, files.label(other))
        name, given = other, processor.get("image_processor") or {}
    fields = checked(given, PreparingFields, files.label(name))
    for switch in ("do_resize", "do_rescale", *(["do_normalize"] if normalizes else [])):
        if fields.get(switch) is False:
            raise ModelError(f"model: {files.label(name)}: {switch}: false is not served")
    return fields
