"""Annotation of a sampling field. Each field of SamplingParams that a request, a model or the page may set has one; all
other lists of sampling fields are derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    text: str
    """Description in the reference."""
    minimum: float | None = None
    maximum: float | None = None
    """Bounds of a number, or None."""
    excludes_minimum: bool = False
    is_copied: bool = True
    """True if requests have a field of this name and type, passed on unchanged."""
    has_model_default: bool = False
    """True if the default comes from the model's generation_config.json."""
    setting_label: str = ""
    """Label in the page's settings and in presets; "": not a setting."""
    setting_step: float = 1.0
    """Step of the arrow buttons on the page."""


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    name: str
    type: type
    """float, int or bool; for an optional number the number's type."""
    default: Any
    field: SamplingField
