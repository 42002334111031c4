"""The smaller model that guesses what the served one will say: its weights, pages and executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from quire.engine.checkpoint.files import ModelConfig, read_model_config, resolve_model
from quire.engine.checkpoint.page_groups import most_drafts
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, QuireError
from quire.engine.models import decoder_spec
from quire.engine.models.asked import has_chunks, has_latents, has_sinks, head_size, widest
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device import check_attention, holds_decodes
from quire.engine.worker.draft_runner import DraftRunner
from quire.engine.worker.inputs import Slots
from quire.engine.worker.loading.adapted import decoder_kind
from quire.engine.worker.loading.checkpoint import open_weights
from quire.engine.worker.loading.drafts.spare import SparePages, spare_pages
from quire.engine.worker.loading.drafts.started import DraftWorker
from quire.engine.worker.loading.loader import load_weights
from quire.engine.worker.loading.room import Room
from quire.engine.worker.memory import allocate_pages, allocate_states, slot_bytes
from quire.kernels.backend import Backend
from quire.kernels.select import select_backend


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded model that drafts."""

    paged: Decoder
    backend: Backend
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    on_all_ranks: ClassVar[bool] = False

    def state_bytes(self, config: EngineConfig) -> int:
        return slot_bytes(self.paged, config) * (config.max_num_seqs + 1)

    def start(self, config: EngineConfig, room: Room, num_blocks: int, make_heads: object) -> DraftWorker:
        """Allocate pages for as many tokens as the served model has pages for, and some for drafts beyond these."""
        decoder, block_size, capture = self.paged, self.backend.block_size, room.capture
        if decoder.made_by or not holds_decodes(self.backend, decoder.spec):
            capture = None
        drafts = SparePages(num_blocks, spare_pages(config, block_size), decoder.max_model_len)
        count = num_blocks + drafts.spare * config.max_num_seqs
        pages = allocate_pages(decoder, count + (capture is not None))
        positions = decoder.max_model_len + drafts.spare * block_size
        states = allocate_states(decoder, config.max_num_seqs + 1, most_drafts(config))
        scratch = None if capture is None else count
        slots = Slots(config.max_num_seqs, positions, block_size, decoder.device, scratch_page=scratch, states=states)
        runner = DraftRunner(decoder, pages, slots, self.eos_token_ids, capture)
        costs = runner.measure_costs(num_blocks, decoder.max_model_len)
        return DraftWorker(runner, drafts, costs, model=runner)


def load_draft_model(
    config: EngineConfig, served: ModelConfig, backend: Backend, progress: Callable[[], None], like: Decoder
) -> DraftModel:
    """The model that the configuration names. It gets the served one's device, type and kind of backend. Raises
    ConfigError for one that cannot draft for it."""
    assert config.speculative_config is not None
    assert config.speculative_config.model is not None
    try:
        path = resolve_model(config.speculative_config.model)
        model = read_model_config(path)
        if model.vocab_size != served.vocab_size:
            raise ConfigError(f"its vocabulary has {model.vocab_size} tokens, the served model's {served.vocab_size}")
        spec = decoder_spec(replace(model, context=like.max_model_len))
        check_attention(like.device, model, spec)
        if spec.needs_snapshots:
            raise ConfigError(
                f"a {model.model_type}, whose large states cannot take back a guess of their own, does not draft"
            )
        wanted = (like.dtype, head_size(spec, like.device), backend.name, widest(spec).softcap is not None)
        own, _ = select_backend(
            like.device,
            *wanted,
            sinks=has_sinks(spec),
            chunks=has_chunks(spec),
            latents=has_latents(spec),
            kv_dtype=like.kv_dtype,
            activation_bits=config.activation_bits,
        )
        length = min(like.max_model_len, model.max_position)
        weights = open_weights(config, path, model, own, like.dtype)
        decoder = decoder_kind(model)(
            spec,
            own,
            weights.scheme,
            dtype=like.dtype,
            device=like.device,
            max_model_len=length,
            progress=progress,
            kv_dtype=like.kv_dtype,
        )
        with torch.inference_mode():
            size = load_weights(decoder.parameters(), decoder.converted(weights.stream), device=like.device)
    except (QuireError, ValueError) as error:
        raise ConfigError(f"speculative_config.model: {error}", param="speculative_config") from error
    return DraftModel(decoder, own, served.eos_token_ids, size)
