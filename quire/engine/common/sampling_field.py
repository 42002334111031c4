"""Annotates the fields of SamplingParams that a request, a model or the page may set. All other lists of sampling
fields derive from these annotations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    text: str
    """For the reference."""
    minimum: float | None = None
    maximum: float | None = None
    """For both, None means unbounded."""
    excludes_minimum: bool = False
    is_copied: bool = True
    """Requests have a field of this name and type."""
    has_model_default: bool = False
    """generation_config.json may set a default."""
    setting_label: str = ""
    """For the page and presets; "": not a setting."""
    setting_step: float = 1.0


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    name: str
    type: type
    """float, int or bool, even if optional."""
    default: Any
    field: SamplingField
