"""`quire models`: models with short names, and which of them fit on this machine and how fast they can be.

Figures are `quire plan`'s, and limits: a token takes at least as long as reading its weights and keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.model_catalog import CatalogEntry, load_catalog
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes, read_model_sizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize
from quire.server.cli.flags import ExclusiveFlags, build_parser
from quire.server.cli.plan.cpu_rates import with_cpu_rates
from quire.server.cli.plan.estimate import PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine, detect_machine
from quire.server.cli.plan.plan_report import unserved_reasons
from quire.server.cli.settings_flags import bounded_number
from quire.server.cli.unknown_flags import parse_flags

CONTEXT_TOKENS = 4096
"""Context length that must fit, and for which memory is shown."""
_SPEED_CONTEXT_TOKENS = 1024
_LAPTOP_FLOPS = 1e12
"""Assumed 16-bit operations per second. A rough value suffices, because memory limits a single stream."""
_EMBEDDING_BITS = 6.5625
"""Bits per number of Q6_K, which 4-bit files use for tied embeddings."""
_LAPTOPS_FILE = Path(__file__).with_name("laptops.toml")
_HEADER = ("NAME", "FOR", "PARAMETERS", "MEMORY", "CONTEXT", "TOKENS/S", "LICENCE", "FROM")


@dataclass(frozen=True, slots=True)
class ModelRow:
    model: CatalogEntry
    parameters: int
    memory: int
    context: int
    """Context length in tokens that fits; 0 if it is too short or the model is not served."""
    speed: float | None
    """Maximum tokens per second of one stream. None if the model is not for chat or code, or the machine's speed is
    unknown.
    """


def main(argv: Sequence[str], started: float) -> int:
    bandwidth = bounded_number(float, 0, above=True)
    args = parse_flags(
        build_parser(
            "quire models",
            __doc__,
            {
                "what": ExclusiveFlags(
                    {
                        "--laptops": {
                            "action": "store_true",
                            "help": "print the table for three classes of laptops, as Markdown",
                        },
                        "--bandwidth": {
                            "type": bandwidth,
                            "metavar": "GB/s",
                            "help": "bandwidth of this machine's memory; default: measured",
                        },
                    }
                )
            },
        ),
        argv,
    )
    if args.laptops:
        print(format_laptops_markdown())
        return 0
    machine = detect_machine()
    if args.bandwidth is not None:
        machine = replace(machine, bandwidth=args.bandwidth * 1e9, flops=machine.flops or _LAPTOP_FLOPS)
    elif machine.bandwidth is None:
        machine = with_cpu_rates(machine)
    rows = [_HEADER, *(_row_cells(build_row(model, machine)) for model in load_catalog().values())]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip())
    speed = "" if machine.bandwidth is None else f", {machine.bandwidth / 1e9:.0f} GB/s"
    print(f"\n{machine.name}: {machine.memory / GIB:.1f} GiB{speed}.")
    print(f"MEMORY: with {CONTEXT_TOKENS:,} tokens; CONTEXT: what fits; TOKENS/S: of one stream, at most")
    return 0


def build_row(model: CatalogEntry, machine: Machine) -> ModelRow:
    return build_rows(model, [machine])[0]


def build_rows(model: CatalogEntry, machines: Sequence[Machine]) -> list[ModelRow]:
    sizes, stored = _catalog_sizes(model)
    return [_build_row(model, sizes, stored, machine) for machine in machines]


def _build_row(model: CatalogEntry, sizes: ModelSizes, stored: CheckpointSize | None, machine: Machine) -> ModelRow:
    model_estimate = estimate_model(sizes, machine, PlanRequest(), stored)
    min_context = min(CONTEXT_TOKENS, sizes.max_position)
    keys = model_estimate.context_kv_bytes(min_context) if model_estimate.block_bytes else 0
    memory = model_estimate.device_weight_bytes + keys + (0 if machine.gpu else ENGINE_HOST_BYTES)
    context = (
        model_estimate.context
        if model_estimate.fits and model_estimate.context >= min_context and not unserved_reasons(model_estimate)
        else 0
    )
    speed = (
        model_estimate.max_decode_tokens_per_second(1, min(_SPEED_CONTEXT_TOKENS, min_context))
        if model_estimate.block_bytes and model.use_case in ("chat", "code")
        else None
    )
    return ModelRow(model, sizes.num_parameters, memory, context, speed)


def catalog_config_and_weights(model: CatalogEntry) -> tuple[dict[str, Any], CheckpointSize | None]:
    if model.gigabytes is None:
        return dict(model.config), None
    bits = 8e9 * model.gigabytes / read_model_sizes(model.config).num_parameters
    quantized = {"quant_method": "gguf", "fmt": model.hub_name.tag, "bits": bits, "group_size": -1}
    config = {**model.config, "dtype": "bfloat16", "quantization_config": quantized}
    return config, CheckpointSize(0, round(model.gigabytes * 1e9), _EMBEDDING_BITS)


def _catalog_sizes(model: CatalogEntry) -> tuple[ModelSizes, CheckpointSize | None]:
    config, stored = catalog_config_and_weights(model)
    return read_model_sizes(config), stored


def _row_cells(row: ModelRow) -> tuple[str, ...]:
    fits = f"{row.context:,}" if row.context else "does not fit"
    return (
        row.model.name,
        row.model.use_case,
        _format_count(row.parameters),
        _format_gib(row.memory),
        fits,
        _format_speed(row),
        *_licence_and_hub_cells(row.model),
    )


def _licence_and_hub_cells(model: CatalogEntry) -> tuple[str, str]:
    return model.licence, model.hub_name.display_name


def _format_speed(row: ModelRow) -> str:
    if not row.context or row.speed is None:
        return "-"
    return f"{row.speed:.0f}" if row.speed >= 10 else f"{row.speed:.1f}"


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 999.5e6 else f"{parameters / 1e6:.0f} M"


def _format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def read_laptop_machines() -> list[Machine]:
    table = tomllib.loads(_LAPTOPS_FILE.read_text(encoding="utf-8"))
    return [
        Machine(name, memory=each["free"] * GIB, gpu=False, bandwidth=each["bandwidth"] * 1e9, flops=_LAPTOP_FLOPS)
        for name, each in table.items()
    ]


def format_laptops_markdown() -> str:
    machines = read_laptop_machines()
    lines = [f"| name | parameters | memory | {' | '.join(each.name for each in machines)} | licence | from |"]
    lines.append("|---" * (5 + len(machines)) + "|")
    for model in load_catalog().values():
        rows = build_rows(model, machines)
        fast = [_format_speed(row) if row.speed is not None else "fits" if row.context else "-" for row in rows]
        cells = [
            f"`{model.name}`",
            _format_count(rows[0].parameters),
            _format_gib(rows[0].memory),
            *fast,
            *_licence_and_hub_cells(model),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
