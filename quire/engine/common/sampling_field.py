"""Annotates the fields of SamplingParams that a request, a model or the page may set. All other lists of sampling
fields are derived from these annotations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    text: str
    """Text in the reference."""
    minimum: float | None = None
    maximum: float | None = None
    """None: unbounded, as for `minimum`."""
    excludes_minimum: bool = False
    is_copied: bool = True
    """Requests have a field of this name and type."""
    has_model_default: bool = False
    """generation_config.json may have a default."""
    setting_label: str = ""
    """Label on the page and in presets; "": not a setting."""
    setting_step: float = 1.0
    """Step of the page's arrow buttons."""


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    name: str
    type: type
    """float, int or bool, even if optional."""
    default: Any
    field: SamplingField
