from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from quire.engine.checkpoint.kv_cache_groups import max_draft_tokens_per_step
from quire.engine.checkpoint.model_resolver import read_model_config, resolve_model
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, QuireError
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.engine.models.requirements import (
    attention_head_dim,
    attention_requirements,
)
from quire.engine.worker.device_memory import allocate_kv_blocks, allocate_slot_states, slot_state_bytes
from quire.engine.worker.device_plan import (
    can_capture_decodes,
    check_device_supports_attention,
    check_kv_dtype_supports_attention,
)
from quire.engine.worker.draft_model_runner import DraftModelRunner
from quire.engine.worker.input_batch import InputBatch, SlotStateTensors
from quire.engine.worker.loading.checkpoint_weights import open_weights
from quire.engine.worker.loading.drafts.device_drafter import StartedDrafter
from quire.engine.worker.loading.drafts.spare_blocks import SpareBlockLayout, num_spare_blocks_per_slot
from quire.engine.worker.loading.kv_allocation import RunnerResources
from quire.engine.worker.loading.transformers_support import decoder_class
from quire.engine.worker.loading.weight_loader import load_weights
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import select_backend


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    kv_module: Decoder
    backend: Backend
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    is_on_all_ranks: ClassVar[bool] = False

    def total_slot_state_bytes(self, config: EngineConfig) -> int:
        return slot_state_bytes(self.kv_module, config) * (config.max_num_seqs + 1)

    def start_drafter(
        self, config: EngineConfig, allocation: RunnerResources, num_blocks: int, make_heads: object
    ) -> StartedDrafter:
        decoder = self.kv_module
        block_size = self.backend.block_size
        capture = allocation.capture
        if decoder.transformers_class or not can_capture_decodes(self.backend, decoder.spec):
            capture = None
        spare_blocks = SpareBlockLayout(
            num_blocks, num_spare_blocks_per_slot(config, block_size), decoder.max_model_len
        )
        total_blocks = num_blocks + spare_blocks.spare_per_slot * config.max_num_seqs
        kv_tensors = allocate_kv_blocks(decoder, total_blocks + (capture is not None))
        max_positions = decoder.max_model_len + spare_blocks.spare_per_slot * block_size
        states = allocate_slot_states(decoder, config.max_num_seqs + 1, max_draft_tokens_per_step(config))
        scratch = None if capture is None else total_blocks
        input_batch = InputBatch(
            config.max_num_seqs,
            max_positions,
            block_size,
            decoder.device,
            scratch_block=scratch,
            slot_states=SlotStateTensors(states),
        )
        runner = DraftModelRunner(decoder, kv_tensors, input_batch, self.eos_token_ids, capture)
        costs = runner.measure_draft_costs(num_blocks, decoder.max_model_len)
        return StartedDrafter(runner, spare_blocks, costs, model_runner=runner)


def load_draft_model(
    config: EngineConfig,
    eos_token_ids: tuple[int, ...],
    backend: Backend,
    progress: Callable[[], None],
    target_model: Decoder,
) -> LoadedDraftModel:
    """Raises ConfigError."""
    assert config.speculative_config is not None
    assert config.speculative_config.model is not None
    try:
        path = resolve_model(config.speculative_config.model)
        model = read_model_config(path)
        if model.vocab_size != target_model.spec.vocab_size:
            raise ConfigError(
                f"its vocabulary has {model.vocab_size} tokens, the served model's {target_model.spec.vocab_size}"
            )
        spec = decoder_spec(replace(model, max_model_len=target_model.max_model_len))
        check_device_supports_attention(target_model.device, model, spec)
        check_kv_dtype_supports_attention(target_model.kv_dtype, spec)
        if spec.needs_state_snapshots:
            raise ConfigError(
                f"a {model.model_type} cannot draft: its recurrent state cannot be rolled back after rejected tokens"
            )
        draft_backend, _ = select_backend(
            target_model.device,
            target_model.dtype,
            attention_head_dim(spec, target_model.device),
            backend.name,
            attention_requirements(spec, target_model.kv_dtype),
            activation_bits=config.activation_bits,
        )
        length = min(target_model.max_model_len, model.max_position)
        weights = open_weights(config, path, model, draft_backend, target_model.dtype)
        decoder = decoder_class(model)(
            spec,
            BuildContext(
                backend=draft_backend,
                scheme=weights.scheme,
                hidden_size=spec.hidden_size,
                dtype=target_model.dtype,
                kv_dtype=target_model.kv_dtype,
                device=target_model.device,
                max_model_len=length,
            ),
            progress,
        )
        with torch.inference_mode():
            size = load_weights(
                decoder.parameters(), decoder.convert_weights(weights.stream), device=target_model.device
            )
    except (QuireError, ValueError) as error:
        raise ConfigError(f"speculative_config.model: {error}", param="speculative_config") from error
    return LoadedDraftModel(decoder, draft_backend, eos_token_ids, size)
