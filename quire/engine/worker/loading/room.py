"""What a loaded model's steps need beside its weights: pages, slots, and what captures steps as graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from quire.engine.checkpoint.kv_plan import StateShares
from quire.engine.checkpoint.page_groups import most_drafts
from quire.engine.config import EngineConfig
from quire.engine.worker.device import Chosen, choose_capture
from quire.engine.worker.inputs import Slots
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.memory import allocate_explained, allocate_states, explained
from quire.kernels.probe import Capture


@dataclass(frozen=True, slots=True)
class Room:
    capture: Capture | None
    """None: decodes do not become graphs."""
    pages: list[Tensor]
    """As allocate_pages makes them."""
    slots: Slots
    eager_prompts: str | None = None
    """Why steps with prompts do not become graphs, where decodes do."""


def make_room(
    config: EngineConfig, chosen: Chosen, loaded: LoadedModel, pages: int, max_model_len: int, shares: StateShares
) -> Room:
    """Room for so many pages of single groups of layers, and for these slots. Raises ConfigError where memory is
    short."""
    device, backend, groups = chosen.device, chosen.backend, len(loaded.groups.windows)
    # What a class of transformers does in a step, no graph can be relied on to hold.
    graphs = "generate" in loaded.tasks and not loaded.model.made_by
    capture = choose_capture(config, backend, device, chosen.spec) if graphs else None
    size, shard = backend.block_size, loaded.model.shard
    own = shard.own(size)
    # A page more is nobody's: of the rows that fill up a graph, and of tokens that other ranks keep.
    nobodys = own.count > 1 and not backend.passes_over
    held = allocate_explained(loaded.model, pages + (nobodys or capture is not None))
    drafts = most_drafts(config)
    with explained(f"the states of {shares.sequences} sequences", "max_num_seqs", "Lower it"):
        states = allocate_states(loaded.model, shares.slots, drafts)
    slots = Slots(
        shares.sequences,
        max_model_len,
        size,
        device,
        scratch_page=None if capture is None else pages,
        groups=groups,
        states=states,
        drafts=drafts,
        own=replace(own, elsewhere=pages * own.tile) if nobodys else own,
    )
    return Room(capture, held, slots, None if capture is None else chosen.eager_prompts)
