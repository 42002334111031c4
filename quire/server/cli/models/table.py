"""`quire models`: the models with short names, and for this machine which of them fit and how fast they can be.

The figures are `quire plan`'s arithmetic, and limits: a token takes at least as long as reading its weights and keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.catalog import CatalogEntry, known_models
from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.checkpoint.safetensors import StoredWeights
from quire.engine.checkpoint.sizes import ModelSizes, read_sizes
from quire.server.cli.flags import OneOf, command
from quire.server.cli.plan.estimate import Wishes, estimate
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine, this_machine
from quire.server.cli.plan.rates import with_rates
from quire.server.cli.plan.report import unserved
from quire.server.cli.settings import number
from quire.server.cli.unknown_flags import parse_known

CONTEXT = 4096
"""Tokens of context for which memory is given, and which have to fit."""
_SHORT = 1024
"""Tokens of context for which the speed is given, as `quire plan` does."""
_FLOPS = 1e12
"""16-bit operations per second of a laptop's CPU, roughly; one stream waits for memory instead."""
_TABLE_BITS = 6.5625
"""Of an embedding that is the head too, in files of four bits: Q6_K."""
_LAPTOPS = Path(__file__).with_name("laptops.toml")
_HEAD = ("NAME", "FOR", "PARAMETERS", "MEMORY", "CONTEXT", "TOKENS/S", "LICENCE", "FROM")


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model on a machine."""

    model: CatalogEntry
    parameters: int
    memory: int
    """Bytes with CONTEXT tokens of one request, Quire's own included."""
    context: int
    """Tokens that fit; 0: it does not fit, or is not served there."""
    speed: float | None
    """Tokens per second of one stream at most; None for an encoder."""


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status."""
    bandwidth = number(float, 0, above=True)
    args = parse_known(
        command(
            "quire models",
            __doc__,
            {
                "what": OneOf(
                    {
                        "--laptops": {
                            "action": "store_true",
                            "help": "the same for three classes of laptops, as Markdown",
                        },
                        "--bandwidth": {
                            "type": bandwidth,
                            "metavar": "GB/s",
                            "help": "of this machine's memory; default: measured",
                        },
                    }
                )
            },
        ),
        argv,
    )
    if args.laptops:
        print(as_markdown())
        return 0
    machine = this_machine()
    if args.bandwidth is not None:
        machine = replace(machine, bandwidth=args.bandwidth * 1e9, flops=machine.flops or _FLOPS)
    elif machine.bandwidth is None:
        machine = with_rates(machine)
    rows = [_HEAD, *(_shown(row_of(model, machine)) for model in known_models().values())]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip())
    speed = "" if machine.bandwidth is None else f", {machine.bandwidth / 1e9:.0f} GB/s"
    print(f"\n{machine.name}: {machine.memory / GIB:.1f} GiB{speed}.")
    print(f"MEMORY: with {CONTEXT:,} tokens; CONTEXT: what fits; TOKENS/S: of one stream, at most")
    return 0


def row_of(model: CatalogEntry, machine: Machine) -> ModelRow:
    sizes, stored = _sizes(model)
    made = estimate(sizes, machine, Wishes(), stored)
    least = min(CONTEXT, sizes.max_position)
    keys = made.context_bytes(least) if made.page_bytes else 0
    memory = made.device_weight_bytes + keys + (0 if machine.gpu else ENGINE_HOST_BYTES)
    context = made.context if made.fits and made.context >= least and not unserved(made) else 0
    speed = made.decode_limit(1, min(_SHORT, least)) if made.page_bytes and model.use in ("chat", "code") else None
    return ModelRow(model, sizes.parameters, memory, context, speed)


def described(model: CatalogEntry) -> tuple[dict[str, Any], StoredWeights | None]:
    """What config.json would say of a model, and the header of its GGUF file."""
    if model.gigabytes is None:
        return dict(model.config), None
    bits = 8e9 * model.gigabytes / read_sizes(model.config).parameters
    quantized = {"quant_method": "gguf", "fmt": model.hub.tag, "bits": bits, "group_size": -1}
    config = {**model.config, "dtype": "bfloat16", "quantization_config": quantized}
    return config, StoredWeights(0, round(model.gigabytes * 1e9), _TABLE_BITS)


def _sizes(model: CatalogEntry) -> tuple[ModelSizes, StoredWeights | None]:
    """A model's sizes, and what its GGUF file's header would say of them."""
    config, stored = described(model)
    return read_sizes(config), stored


def _shown(row: ModelRow) -> tuple[str, ...]:
    fits = f"{row.context:,}" if row.context else "does not fit"
    return (
        row.model.name,
        row.model.use,
        _count(row.parameters),
        _gib(row.memory),
        fits,
        _speed(row),
        *_source(row.model),
    )


def _source(model: CatalogEntry) -> tuple[str, str]:
    return model.licence, model.hub.shown


def _speed(row: ModelRow) -> str:
    if not row.context or row.speed is None:
        return "-"
    return f"{row.speed:.0f}" if row.speed >= 10 else f"{row.speed:.1f}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 999.5e6 else f"{parameters / 1e6:.0f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def laptops() -> list[Machine]:
    table = tomllib.loads(_LAPTOPS.read_text(encoding="utf-8"))
    return [
        Machine(name, memory=each["free"] * GIB, gpu=False, bandwidth=each["bandwidth"] * 1e9, flops=_FLOPS)
        for name, each in table.items()
    ]


def as_markdown() -> str:
    """The table of the documents: what each class of laptops can do at most, in tokens a second; -: does not fit."""
    machines = laptops()
    lines = [f"| name | parameters | memory | {' | '.join(each.name for each in machines)} | licence | from |"]
    lines.append("|---" * (5 + len(machines)) + "|")
    for model in known_models().values():
        rows = [row_of(model, machine) for machine in machines]
        fast = [_speed(row) if row.speed is not None else "fits" if row.context else "-" for row in rows]
        cells = [f"`{model.name}`", _count(rows[0].parameters), _gib(rows[0].memory), *fast, *_source(model)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
