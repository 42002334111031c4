"""The plan of an engine's configuration."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.alike.mtp import without_mtp
from quire.engine.checkpoint.families import WITH_EXPERTS, has_file
from quire.engine.checkpoint.files import text_config
from quire.engine.checkpoint.overrides import configured
from quire.engine.checkpoint.page_groups import context_decides, rope_context
from quire.engine.checkpoint.safetensors import StoredWeights, read_stored_weights
from quire.engine.checkpoint.sizes import ModelSizes, read_sizes
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, ModelError
from quire.engine.lora.modules import planned_modules
from quire.server.cli.plan.drafts import planned_draft
from quire.server.cli.plan.estimate import Estimate, Wishes, estimate
from quire.server.cli.plan.machine import Machine, divided, read_cards


def wishes_of(config: EngineConfig, raw: dict[str, Any], folder: Path | None, concurrency: int | None = None) -> Wishes:
    """What an engine with this configuration is asked for, of a model with this config.json, and its weights in
    `folder` if they are on this machine. Raises ModelError for what guesses tokens and cannot be read."""
    modules = planned_modules(raw) if config.enable_lora else {}
    return Wishes(config, concurrency, modules, planned_draft(config.speculative_config, raw, folder))


def sizes_of(config: EngineConfig, raw: dict[str, Any]) -> ModelSizes:
    """Of a model with this config.json, as this configuration serves it. Raises ModelError, and ConfigError for a
    rope_context that it has no use for."""
    sizes, text = read_sizes(raw), text_config(raw)
    by_class = config.model_impl == "transformers" or not has_file(raw)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    decides = context_decides(sizes.model_type, rope if isinstance(rope, dict) else {}, raw if by_class else None)
    rope_context(config, sizes.max_position, decides=decides)
    return replace(sizes, max_position=min(sizes.max_position, config.rope_context or sizes.max_position))


def shared_out(machine: Machine, config: EngineConfig) -> Machine:
    """So many of it, or of its parts, as this configuration has processes. Raises ConfigError as `divided`."""
    counts = config.tensor_parallel_size, config.data_parallel_size, config.pipeline_parallel_size
    return divided(machine, *counts, config.nnodes)


def predicted_tokens(config: EngineConfig, machine: Machine) -> int | None:
    """Tokens that the KV cache of an engine with this configuration will hold.

    None if no estimate can be made, or none is needed because num_kv_blocks is given. The model's files must exist.
    """
    if config.num_kv_blocks is not None or (found := _planned(config, machine)) is None:
        return None
    return found.made.num_blocks * found.made.block_size or None


def way_out(config: EngineConfig, machine: Machine) -> str:
    """Why the model does not fit, in the figures of `quire plan`, and what to do; "" where it should fit, or nothing
    can be estimated."""
    found = _planned(config, machine)
    if found is None or found.made.fits:
        return ""
    fewer_bits = lighter(found.sizes, found.made.machine, found.wishes, found.stored)
    told = "; ".join(found.made.reasons)
    if fewer_bits is not None:
        told += f"; with --quantization {fewer_bits} it fits"
    return f"{told}. {shlex.join(['quire', 'plan', config.model])} has the arithmetic, quire models what fits here"


@dataclass(frozen=True, slots=True)
class _Planned:
    made: Estimate
    sizes: ModelSizes
    wishes: Wishes
    stored: StoredWeights | None


def _planned(config: EngineConfig, machine: Machine) -> _Planned | None:
    try:
        raw, folder = configured(config)
        sizes, files = sizes_of(config, raw), folder if config.load_format == "auto" else None
        stored = None if files is None else read_stored_weights(files, without_mtp(sizes.num_layers))
        wishes = wishes_of(config, raw, files)
        parts = shared_out(machine, config)
        return _Planned(estimate(sizes, parts, wishes, stored), sizes, wishes, stored)
    except (ModelError, ConfigError):
        return None


_COUNTS = (1, 2, 4, 8)
"""Numbers of devices that `cheapest` tries."""


def cheapest(sizes: ModelSizes, wishes: Wishes, stored: StoredWeights | None, at_least: int = 1) -> Machine | None:
    """The GPU of the table with the least memory on which the model fits, or several such GPUs, `at_least` so many;
    None if none do."""
    cards = sorted(read_cards().values(), key=lambda card: (card.memory, card.bandwidth or 0.0))
    for count in (each for each in _COUNTS if each >= at_least):
        for card in cards:
            machine = replace(card, count=count)
            if estimate(sizes, machine, wishes, stored).fits:
                return machine
    return None


def lighter(sizes: ModelSizes, machine: Machine, wishes: Wishes, stored: StoredWeights | None) -> str | None:
    """The --quantization with which the model fits there, the one that changes it least; None if none does."""
    config = wishes.config
    if config.at_load is not None or sizes.quantization or sizes.model_type in WITH_EXPERTS:
        return None
    for name in ("int8", "int4"):
        fewer = replace(wishes, config=config.model_copy(update={"quantization": name}))
        if estimate(sizes, machine, fewer, stored).fits:
            return name
    return None
