"""A family of models that take images: of which family the text is, and what is read of an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.families.base.vision.vision_spec import VisionConfig, VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalFamily:
    model_types: tuple[str, ...]
    """What config.json of the whole model calls it."""
    text_model_type: str
    """Of its text part, where text_config does not say it."""
    read_vision_spec: Callable[[VisionConfig], VisionSpec] | None
    """Reads what config.json says of images; raises ModelError. None: its text alone is served."""
    takes_unnormalized_pixels: bool = False
    """Pixels may be from 0 to 1."""
