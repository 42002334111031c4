from __future__ import annotations

from collections.abc import Callable

from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models.decoder import Decoder
from quire.engine.worker.loading.drafts.device_drafter import LoadedDrafter
from quire.engine.worker.loading.drafts.draft_model_loader import load_draft_model
from quire.engine.worker.loading.drafts.mtp_loader import load_head_drafter
from quire.kernels.backend import Backend


def load_drafter(
    config: EngineConfig, model_config: ModelConfig, backend: Backend, progress: Callable[[], None], model: Decoder
) -> LoadedDrafter | None:
    """Raises ConfigError."""
    if (speculative := config.speculative_config) is None or not speculative.has_weights:
        return None
    if speculative.uses_hidden_states:
        return load_head_drafter(config, model_config, backend, model)
    return load_draft_model(config, model_config.eos_token_ids, backend, progress, model)
