"""The annotation of a sampling field. Each field of SamplingParams that a request, a model or the page may set has one;
all other lists of sampling fields are made of these annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 2**31 - 1
"""The largest number that a field of tokens may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """A row of the table of sampling fields."""

    text: str
    """What it does, as the reference says it."""
    minimum: float | None = None
    maximum: float | None = None
    """Bounds of a number; None: it has none."""
    excludes_minimum: bool = False
    is_copied: bool = True
    """Whether requests have a field of this name and type, whose value the engine gets as it is."""
    has_model_default: bool = False
    """Whether a request that leaves it out gets what the model's generation_config.json says."""
    setting_label: str = ""
    """What settings call it, those of the page and of presets; "": they do not have it."""
    setting_step: float = 1.0
    """What one press of an arrow adds on the page."""


@dataclass(frozen=True, slots=True)
class NamedSamplingField:
    """A row with what the declaration says."""

    name: str
    type: type
    """float, int or bool; of a number that may be left out, the number's."""
    default: Any
    field: SamplingField
