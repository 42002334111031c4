"""Each field of SamplingParams that a request, a model or the page may set has such an annotation; all other lists of
sampling fields are derived from them.
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
    """None: unbounded, like `minimum`."""
    excludes_minimum: bool = False
    is_copied: bool = True
    """Requests have a field of this name and type."""
    has_model_default: bool = False
    """True if generation_config.json has a default."""
    setting_label: str = ""
    """Label on the page and in presets; "": not a setting."""
    setting_step: float = 1.0
    """Step of the page's arrow buttons."""


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    name: str
    type: type
    """float, int or bool, also if optional."""
    default: Any
    field: SamplingField
