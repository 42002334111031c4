"""What guesses tokens with weights of its own: a model or heads, loaded, and then started with their pages."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.models.decoder import Decoder
from quire.engine.worker.loading.drafts.model import load_draft_model
from quire.engine.worker.loading.drafts.mtp import load_head
from quire.engine.worker.loading.drafts.started import LoadedDraft
from quire.kernels.backend import Backend


def load_drafting(
    config: EngineConfig, served: ModelConfig, backend: Backend, progress: Callable[[], None], model: Decoder
) -> LoadedDraft | None:
    """What guesses tokens with weights of its own, if something does. Raises ConfigError."""
    if (speculative := config.speculative_config) is None or not speculative.has_weights:
        return None
    if speculative.hidden_states:
        return load_head(config, served, backend, model)
    return load_draft_model(config, served, backend, progress, model)
