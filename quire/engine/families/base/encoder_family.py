"""A family of encoders: models that only read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.families.base.family import ModelFamily
from quire.engine.families.base.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily(ModelFamily):
    build_spec: Callable[[ModelConfig], EncoderSpec]
    """Makes the spec; raises ModelError for what is not computed."""
    reads_classifier_pooling: bool = False
    """A classifier may score the mean of all tokens, where classifier_pooling says so."""
    embedding_size: Callable[[ModelConfig], int] | None = None
    """Reads the numbers of a vector of dual encoders, where images have one beside texts. None: it is none."""
    outer_fields: tuple[str, ...] = ()
    """Fields that config.json of the whole model has; what its text_config says of them nobody reads."""
