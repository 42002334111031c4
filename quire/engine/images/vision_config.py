from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import convert_parsed_json
from quire.engine.families import find_multimodal_family
from quire.engine.families.base.vision.vision_config_fields import (
    ModelConfigFields,
    PreprocessorFields,
    ProcessorFields,
    VisionConfigFields,
)
from quire.engine.families.base.vision.vision_spec import VisionConfig, VisionSpec
from quire.engine.gguf.model_files import ModelFiles

ENCODER_CACHE_BYTES = 256 << 20
"""Maximum bytes of cached image features. Evicted features are computed again, with equal bits."""


def can_read_images(raw: Mapping[str, Any]) -> bool:
    family = find_multimodal_family(raw.get("model_type"))
    return family is not None and family.read_vision_spec is not None and raw.get("vision_config") is not None


def read_vision_spec(path: Path, raw: Mapping[str, Any] | None = None) -> VisionSpec | None:
    """`raw` replaces config.json. Raises ModelError."""
    files = ModelFiles(path)
    content, label = files.read_json_file("config.json") if raw is None else raw, files.file_label("config.json")
    if content is None or not can_read_images(content):
        return None
    family = find_multimodal_family(content.get("model_type"))
    normalizes = family is None or not family.takes_unnormalized_pixels
    preprocessor = _read_preprocessor(files, normalizes=normalizes)
    return _make_vision_spec(content, preprocessor, label)


def count_vision_and_linear_parameters(raw: Mapping[str, Any], text_size: int) -> tuple[int, int]:
    """Return (all parameters, quantizable parameters), or (0, 0) if the model reads no images. Raises ModelError."""
    if not can_read_images(raw):
        return 0, 0
    vision = _make_vision_spec(raw, {}, "config.json", parameters_only=True)
    return vision.num_parameters(text_size), vision.num_linear_parameters


def _make_vision_spec(
    content: Mapping[str, Any], preprocessor: PreprocessorFields, label: str, *, parameters_only: bool = False
) -> VisionSpec:
    vision_config, text = content.get("vision_config") or {}, content.get("text_config") or {}
    if not isinstance(vision_config, dict):
        raise ModelError(f"model: {label}: vision_config: expected object")
    tower = convert_parsed_json(vision_config, VisionConfigFields, f"{label}: vision_config")
    outer = convert_parsed_json(dict(content), ModelConfigFields, label)
    text = {**content, **(text if isinstance(text, dict) else {})}
    family = find_multimodal_family(content.get("model_type"))
    read = None if family is None else family.read_vision_spec
    assert read is not None, f"images are not supported for a {content.get('model_type')}"
    return read(VisionConfig(tower, outer, preprocessor, text, label, parameters_only))


def _read_preprocessor(files: ModelFiles, *, normalizes: bool) -> PreprocessorFields:
    """do_normalize may be disabled unless `normalizes`."""
    name, other = "preprocessor_config.json", "processor_config.json"
    content = files.read_json_file(name)
    if content is None:
        processor = convert_parsed_json(files.read_json_file(other) or {}, ProcessorFields, files.file_label(other))
        name, content = other, processor.get("image_processor") or {}
    fields = convert_parsed_json(content, PreprocessorFields, files.file_label(name))
    for switch in ("do_resize", "do_rescale", *(["do_normalize"] if normalizes else [])):
        if fields.get(switch) is False:
            raise ModelError(f"model: {files.file_label(name)}: {switch}: false is not served")
    return fields
