from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.families.base.vision.vision_spec import VisionConfig, VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalFamily:
    model_types: tuple[str, ...]
    text_model_type: str
    read_vision_spec: Callable[[VisionConfig], VisionSpec] | None
    """If None, only text is supported. Raises ModelError."""
    takes_unnormalized_pixels: bool = False
    """The tower accepts pixels from 0 to 1."""
