"""`quire plan`: what fits where, and how fast it can be at most; from config.json alone, without GPU and weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.engine.checkpoint.alike.mtp import without_mtp
from quire.engine.checkpoint.catalog import known_models
from quire.engine.checkpoint.families import WITH_EXPERTS
from quire.engine.checkpoint.files import must_come
from quire.engine.checkpoint.overrides import configured, with_overrides
from quire.engine.checkpoint.safetensors import read_stored_weights
from quire.engine.errors import ConfigError
from quire.server.cli.flags import OneOf, add, command
from quire.server.cli.models.table import described
from quire.server.cli.plan.configured import cheapest, lighter, shared_out, sizes_of, wishes_of
from quire.server.cli.plan.estimate import estimate
from quire.server.cli.plan.images import images, planned_images, vision_of
from quire.server.cli.plan.machine import Machine, find_card, read_cards, this_machine, with_memory
from quire.server.cli.plan.picture import draw
from quire.server.cli.plan.rates import with_rates
from quire.server.cli.plan.report import as_dict, as_table, as_text
from quire.server.cli.settings import add_fields, number, parse
from quire.server.config import ServerConfig

_SHOWN = (
    *("revision", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes", "max_model_len"),
    *("dtype", "kv_cache_dtype", "quantization", "quantize_embedding", "gpu_memory_utilization", "kv_offload_memory"),
    *("kv_offload_dir", "kv_offload_disk", "max_loras", "max_cpu_loras", "max_lora_rank", "speculative_config"),
)
"""The settings of `quire serve` that --help shows; all others are taken too."""


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status: 0 if the model fits, else 1."""
    args, config = parse(_parser(), argv, ServerConfig, "name")
    if args.picture is not None and args.picture.suffix.lower() != ".svg":
        raise ConfigError(f"--picture: draws an SVG; {args.picture.with_suffix('.svg')} would be its name")
    if config.num_kv_blocks is not None:
        raise ConfigError("num_kv_blocks: a plan says how many fit: leave it out, or give --kv-cache-memory")
    if config.kv_offload_disk is not None and config.kv_offload_dir is None:
        raise ConfigError("--kv-offload-disk: says how much --kv-offload-dir DIR may take, which is not given")
    if "max_loras" in vars(args):
        config = config.model_copy(update={"enable_lora": True})
    entry = known_models().get(config.model.lower())
    if entry is not None and must_come(config.model, config.revision):  # of it nothing need be on this machine
        raw, stored = described(entry)
        raw = with_overrides(raw, config.hf_overrides or {})
        folder, sizes = None, sizes_of(config, raw)
    else:
        raw, folder = configured(config)
        sizes = sizes_of(config, raw)
        stored = None if folder is None else read_stored_weights(folder, without_mtp(sizes.num_layers))
    wishes = wishes_of(config, raw, folder, args.concurrency)
    vision = None if args.images is None else vision_of(config.model, config.revision, raw, folder)
    if args.gpu == "all" and vision is not None:
        raise ConfigError("--images: of one machine, not of --gpu all")
    if args.gpu == "all":
        cards = [shared_out(card, config) for card in read_cards().values()]
        print(as_table([estimate(sizes, card, wishes, stored) for card in cards]))
        return 0
    made = estimate(sizes, shared_out(_machine(args), config), wishes, stored)
    known = made.fits or sizes.model_type in WITH_EXPERTS
    better = None if known else cheapest(sizes, wishes, stored, config.tensor_parallel_size)
    if args.picture is not None and made.fits and not made.page_bytes:
        raise ConfigError("--picture: an encoder keeps no KV cache that could be drawn")
    if args.picture is not None:
        try:
            args.picture.write_text(draw(made, config.model), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--picture: cannot write {args.picture}: {error.strerror}") from None
    light = None if made.fits else lighter(sizes, made.machine, wishes, stored)
    shown = None if vision is None else planned_images(args.images, vision, made)
    if args.json:
        print(json.dumps(as_dict(made, better, shown), indent=2))
    else:
        told = ("--config", args.config) if args.config is not None else ()
        print(as_text(replace(made, flags=(*told, *made.flags)), config.model, better, light, shown))
    return 0 if made.fits else 1


def _parser() -> argparse.ArgumentParser:
    positive = number(float, 0, above=True)
    where = {
        "--gpu": {"metavar": "NAME", "help": "a GPU of the table, or all of them; default: this machine"},
        "--memory": {"type": positive, "metavar": "GiB", "help": "a GPU of so much memory"},
    }
    model = "directory, config.json, .gguf file, hub id or short name; default: what --config names, or embedded"
    config = "TOML file of quire serve's settings, or a preset; flags go before it"
    shown = "of a request, as 1x1024x1024: what they take"
    flags = {
        "name": {"nargs": "?", "metavar": "MODEL", "help": model},
        "--config": {"metavar": "FILE", "help": config},
        "where": OneOf(where),
        "--bandwidth": {"type": positive, "metavar": "GB/s", "help": "the device's, if the table lacks it"},
        "--measure": {"action": "store_true", "help": "measure this machine's CPU again"},
        "--tflops": {"type": positive, "metavar": "N", "help": "the device's 16-bit arithmetic, likewise"},
        "--concurrency": {"type": number(int, 1), "metavar": "N", "help": "requests at once; default: what fits"},
        "--images": {"type": images, "metavar": "COUNTxWIDTHxHEIGHT", "help": shown},
        "--json": {"action": "store_true", "help": "print JSON"},
        "--picture": {"type": Path, "metavar": "OUT.svg", "help": "draw memory and what fits"},
    }
    told = "All other flags of quire serve mean here what they mean there."
    parser = command("quire plan", __doc__, flags, epilog=told)
    for name, action in add_fields(parser, ServerConfig, {ServerConfig: "flags of quire serve"}).items():
        if name not in _SHOWN:
            action.help = argparse.SUPPRESS
    same = {"dest": "max_model_len", "metavar": "N", "default": argparse.SUPPRESS, "help": "as --max-model-len"}
    add(parser, {"--context": same})
    return parser


def _machine(args: argparse.Namespace) -> Machine:
    if args.gpu is not None:
        machine = find_card(args.gpu)
    else:
        machine = this_machine() if args.memory is None else with_memory(args.memory)
    if (args.bandwidth is None) != (args.tflops is None) and machine.bandwidth is None:
        raise ConfigError("--bandwidth and --tflops go together: a limit needs both")
    if not machine.gpu and args.bandwidth is None and args.tflops is None:
        machine = with_rates(machine, again=args.measure)
    return replace(
        machine,
        bandwidth=machine.bandwidth if args.bandwidth is None else args.bandwidth * 1e9,
        flops=machine.flops if args.tflops is None else args.tflops * 1e12,
    )
