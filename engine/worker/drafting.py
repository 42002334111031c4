"""What guesses tokens with weights of its own: a model or heads, loaded, and then started with their pages."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.models.decoder import Decoder
from quire.engine.worker.draft_runner import DraftRunner
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.drafts.head import LoadedHead, start_heads
from quire.engine.worker.loading.drafts.model import (
    DraftModel,
    DraftWorker,
    load_draft_model,
    spare_pages,
    start_draft_worker,
)
from quire.engine.worker.loading.drafts.mtp import load_head
from quire.engine.worker.loading.room import Room
from quire.kernels.backend import Backend


def load_drafting(
    config: EngineConfig, served: ModelConfig, backend: Backend, progress: Callable[[], None], model: Decoder
) -> DraftModel | LoadedHead | None:
    """What guesses tokens with weights of its own, if something does. Raises ConfigError."""
    if (speculative := config.speculative_config) is None or not speculative.has_weights:
        return None
    if speculative.hidden_states:
        return load_head(config, served, backend, model)
    return load_draft_model(config, served, backend, progress, model)


def start_drafting(
    draft: DraftModel | LoadedHead | None,
    config: EngineConfig,
    model: Decoder,
    room: Room,
    num_blocks: int,
    make_heads: Callable[..., Heads],
) -> tuple[DraftWorker[DraftRunner] | DraftWorker[Heads] | None, Heads | None]:
    """The same with its pages; and the heads, where it is these, which the runner runs beside every step. `room`: the
    served model's."""
    if isinstance(draft, LoadedHead):
        heads = start_heads(draft, config, model, room.slots, num_blocks, make_heads)
        spare = spare_pages(config, room.slots.block_size)
        return DraftWorker(heads, spare, model.max_model_len, heads.measure_costs()), heads
    return None if draft is None else start_draft_worker(draft, config, num_blocks, room.capture), None
