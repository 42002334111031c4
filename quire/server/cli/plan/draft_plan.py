from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.architecture.draft_heads import MTPSpec
from quire.engine.architecture.kv_cache_spec import KVElementSizes
from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.checkpoint.config_reader import extract_text_config, parse_family_config
from quire.engine.checkpoint.family_spec import build_eagle_spec, read_decoder_spec
from quire.engine.checkpoint.kv_cache_plan import StateSlotCounts, count_state_slots
from quire.engine.checkpoint.model_resolver import DRAFT_HEAD_FILE_PATTERNS, read_raw_config, resolve_model
from quire.engine.checkpoint.mtp_names import find_mtp_names, mtp_layer_config
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes, read_model_sizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size
from quire.engine.common.config import SpeculativeConfig
from quire.engine.common.errors import ConfigError, ModelError


@dataclass(frozen=True, slots=True)
class DraftPlan:
    speculative_config: SpeculativeConfig
    stored: CheckpointSize
    sizes: ModelSizes | None
    """None if the draft has no KV cache of its own."""

    @property
    def is_separate_model(self) -> bool:
        """The KV of a separate draft model is not stored in tiers; the KV of draft heads is."""
        return self.speculative_config.method == "draft_model"

    def draft_weight_bytes(self, width: int) -> int:
        """`width`: bytes per number."""
        return self.stored.num_floats * width + self.stored.packed_bytes

    def num_extra_blocks_for_draft_tokens(self, block_size: int) -> int:
        return 1 + -(-self.speculative_config.num_speculative_tokens // block_size)


ONE_STATE_SLOT = StateSlotCounts(1, 0)


def plan_state_slots(
    served: ModelSizes, slot: int, budget: int, state_memory: float | None, sequences: int, *, cached: bool, gpu: bool
) -> StateSlotCounts:
    """Returns one slot if not even this fits, so that the plan can show what does not fit."""
    try:
        return count_state_slots(
            slot,
            budget,
            state_memory,
            sequences,
            needs_snapshots=served.needs_snapshots,
            prefix_caching=cached,
            on_gpu=gpu,
        )
    except ConfigError:
        return ONE_STATE_SLOT


def state_slot_bytes(
    served: ModelSizes,
    drafting: ModelSizes | None,
    max_draft_tokens: int,
    element_sizes: KVElementSizes,
    num_parts: int,
    num_devices_per_memory: int,
) -> int:
    """Returns the bytes per request and device outside of KV blocks. The draft's bytes are divided by
    `num_devices_per_memory`, because only one of the devices that share a memory drafts.
    """
    own = 0 if drafting is None else drafting.slot_bytes(max_draft_tokens, element_sizes)
    return served.slot_bytes(max_draft_tokens, element_sizes) // num_parts + own // num_devices_per_memory


def plan_draft(
    speculative_config: SpeculativeConfig | None, served: Mapping[str, Any], folder: Path | None
) -> DraftPlan | None:
    """Returns None if drafting needs no weights. `served` is the served model's config.json. Raises ModelError."""
    if speculative_config is not None and speculative_config.method == "mtp":
        return _plan_mtp(speculative_config, extract_text_config(served), folder)
    if speculative_config is None or speculative_config.model is None:
        return None
    if speculative_config.method == "medusa":
        stored = read_checkpoint_size(resolve_model(speculative_config.model, patterns=DRAFT_HEAD_FILE_PATTERNS))
        return DraftPlan(speculative_config, stored or CheckpointSize(0, 0), None)
    raw, folder = read_raw_config(speculative_config.model)
    sizes = read_model_sizes(raw)
    draft_weights = None if folder is None else read_checkpoint_size(folder)
    if draft_weights is None:
        draft_weights = CheckpointSize(_count_draft_parameters(speculative_config, raw, sizes, served), 0)
    return DraftPlan(speculative_config, draft_weights, sizes)


def _count_draft_parameters(
    speculative_config: SpeculativeConfig, raw: Mapping[str, Any], sizes: ModelSizes, served: Mapping[str, Any]
) -> int:
    if speculative_config.method == "draft_model":
        return sizes.num_parameters
    target_layers = read_model_sizes(served).num_layers
    is_eagle3 = speculative_config.method == "eagle3"
    spec = build_eagle_spec(parse_family_config(raw, "config.json"), target_layers, is_eagle3=is_eagle3)
    return count_parameters(spec.parameter_shapes())


def _plan_mtp(speculative_config: SpeculativeConfig, text: Mapping[str, Any], folder: Path | None) -> DraftPlan:
    layers = read_model_sizes(text).num_layers
    layer_config = mtp_layer_config(text, layers)
    spec = read_decoder_spec(layer_config)
    if spec is None:
        raise ModelError(
            f"model: no file of Quire serves the layer that a {text.get('model_type')} guesses tokens with"
        )
    numbers = count_parameters(MTPSpec.from_decoder(spec).parameter_shapes())
    draft_weights = None
    if folder is not None and read_checkpoint_size(folder) is not None:
        names = find_mtp_names(folder, layers)
        draft_weights = read_checkpoint_size(folder, lambda stored: names.mtp_name_from_checkpoint(stored) is not None)
    return DraftPlan(speculative_config, draft_weights or CheckpointSize(numbers, 0), read_model_sizes(layer_config))
