"""Annotations for the fields of SamplingParams that a request, a model's defaults or the web page may set. All other
lists of sampling fields derive from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    text: str
    minimum: float | None = None
    maximum: float | None = None
    excludes_minimum: bool = False
    is_copied: bool = True
    has_model_default: bool = False
    setting_label: str = ""
    """Label of the setting on the web page and in presets; "" if neither offers the field."""
    setting_step: float = 1.0


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    name: str
    type: type
    """float, int or bool, even if the field may also be None."""
    default: Any
    field: SamplingField
