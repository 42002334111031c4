from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import extract_text_config, has_quire_family
from quire.engine.checkpoint.kv_cache_groups import resolve_rope_context
from quire.engine.checkpoint.mtp_names import make_main_model_filter
from quire.engine.checkpoint.overrides import read_raw_config_with_overrides
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes, read_model_sizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.lora.target_modules import modules_of_config
from quire.server.cli.plan.draft_plan import plan_draft
from quire.server.cli.plan.estimate import Estimate, PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.machine import Machine, divide_machine_by_parallelism, read_gpu_table
from quire.server.cli.plan.misfit import setting_reason


def build_plan_request(
    config: EngineConfig, raw: dict[str, Any], folder: Path | None, concurrency: int | None = None
) -> PlanRequest:
    """Raises ModelError."""
    modules = modules_of_config(raw) if config.enable_lora else {}
    return PlanRequest(config, concurrency, modules, plan_draft(config.speculative_config, raw, folder))


def model_sizes_with_served_context(config: EngineConfig, raw: dict[str, Any]) -> ModelSizes:
    """Raises ModelError, and ConfigError for a rope_context that the model cannot use."""
    sizes, text = read_model_sizes(raw), extract_text_config(raw)
    uses_transformers = config.model_impl == "transformers" or not has_quire_family(raw)
    resolve_rope_context(config, sizes.max_position, text, by_transformers=uses_transformers)
    return replace(sizes, max_position=min(sizes.max_position, config.rope_context or sizes.max_position))


def divide_machine_by_config_parallelism(machine: Machine, config: EngineConfig) -> Machine:
    """Raises ConfigError."""
    counts = config.tensor_parallel_size, config.data_parallel_size, config.pipeline_parallel_size
    return divide_machine_by_parallelism(machine, *counts, config.nnodes)


def predict_kv_tokens(config: EngineConfig, machine: Machine) -> int | None:
    """Returns None if the number cannot be estimated, or num_kv_blocks sets it. The model's files must exist."""
    if config.num_kv_blocks is not None or (plan := _plan_model(config, machine)) is None:
        return None
    return plan.estimate.num_blocks * plan.estimate.block_size or None


def memory_advice(config: EngineConfig, machine: Machine) -> str:
    """Returns "" if the model should fit, this cannot be estimated, or it is not memory that lacks."""
    plan = _plan_model(config, machine)
    if plan is None or plan.estimate.fits or setting_reason(plan.estimate) is not None:
        return ""
    fewer_bits = find_fitting_quantization(plan.sizes, plan.estimate.machine, plan.request, plan.stored)
    advice = "; ".join(plan.estimate.reasons)
    if fewer_bits is not None:
        advice += f"; with --quantization {fewer_bits} it fits"
    return f"{advice}. {shlex.join(['quire', 'plan', config.model])} has the arithmetic, quire models what fits here"


@dataclass(frozen=True, slots=True)
class _ModelPlan:
    estimate: Estimate
    sizes: ModelSizes
    request: PlanRequest
    stored: CheckpointSize | None


def _plan_model(config: EngineConfig, machine: Machine) -> _ModelPlan | None:
    try:
        raw, folder = read_raw_config_with_overrides(config)
        sizes, files = model_sizes_with_served_context(config, raw), folder if config.load_format == "auto" else None
        stored = None if files is None else read_checkpoint_size(files, make_main_model_filter(sizes.num_layers))
        request = build_plan_request(config, raw, files)
        parts = divide_machine_by_config_parallelism(machine, config)
        return _ModelPlan(estimate_model(sizes, parts, request, stored), sizes, request, stored)
    except (ModelError, ConfigError):
        return None


_DEVICE_COUNTS = (1, 2, 4, 8)


def find_smallest_gpu(
    sizes: ModelSizes, request: PlanRequest, stored: CheckpointSize | None, at_least: int = 1
) -> Machine | None:
    cards = sorted(read_gpu_table().values(), key=lambda card: (card.memory, card.bandwidth or 0.0))
    for count in (each for each in _DEVICE_COUNTS if each >= at_least):
        for card in cards:
            machine = replace(card, count=count)
            if estimate_model(sizes, machine, request, stored).fits:
                return machine
    return None


def find_fitting_quantization(
    sizes: ModelSizes, machine: Machine, request: PlanRequest, stored: CheckpointSize | None
) -> str | None:
    config = request.config
    if config.online_quantization is not None or sizes.quantization or sizes.num_experts:
        return None
    for name in ("int8", "int4"):
        quantized_request = replace(request, config=config.model_copy(update={"quantization": name}))
        if estimate_model(sizes, machine, quantized_request, stored).fits:
            return name
    return None
