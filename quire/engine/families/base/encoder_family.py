from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.families.base.family import ModelFamily
from quire.engine.families.base.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily(ModelFamily):
    build_spec: Callable[[ModelConfig], EncoderSpec]
    """Raises ModelError."""
    reads_classifier_pooling: bool = False
    embedding_size: Callable[[ModelConfig], int] | None = None
    outer_fields: tuple[str, ...] = ()
