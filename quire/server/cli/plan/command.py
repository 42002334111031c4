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
from quire.server.cli.flags import ExclusiveFlags, add_flag_table, build_parser
from quire.server.cli.models.table import catalog_config
from quire.server.cli.plan.cpu_rates import with_cpu_rates
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.images_plan import parse_images, plan_images, read_model_vision
from quire.server.cli.plan.machine import Machine, find_gpu, gpu_with_memory, read_gpu_table, this_machine
from quire.server.cli.plan.model_plan import (
    build_plan_request,
    divide_among_processes,
    find_fitting_quantization,
    find_smallest_gpu,
    serving_sizes,
)
from quire.server.cli.plan.plan_report import estimate_dict, format_table, format_text
from quire.server.cli.plan.svg_chart import draw_estimate
from quire.server.cli.settings_flags import add_field_flags, bounded_number, parse_settings
from quire.server.config import ServerConfig

_SHOWN_FLAGS = (
    *("revision", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes", "max_model_len"),
    *("dtype", "kv_cache_dtype", "quantization", "quantize_embedding", "gpu_memory_utilization", "kv_offload_memory"),
    *("kv_offload_dir", "kv_offload_disk", "max_loras", "max_cpu_loras", "max_lora_rank", "speculative_config"),
)
"""The settings of `quire serve` that --help shows; all others are taken too."""


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status: 0 if the model fits, else 1."""
    args, config = parse_settings(_plan_parser(), argv, ServerConfig, "name")
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
        raw, stored = catalog_config(entry)
        raw = with_overrides(raw, config.hf_overrides or {})
        folder, sizes = None, serving_sizes(config, raw)
    else:
        raw, folder = configured(config)
        sizes = serving_sizes(config, raw)
        stored = None if folder is None else read_stored_weights(folder, without_mtp(sizes.num_layers))
    request = build_plan_request(config, raw, folder, args.concurrency)
    vision = None if args.images is None else read_model_vision(config.model, config.revision, raw, folder)
    if args.gpu == "all" and vision is not None:
        raise ConfigError("--images: of one machine, not of --gpu all")
    if args.gpu == "all":
        cards = [divide_among_processes(card, config) for card in read_gpu_table().values()]
        print(format_table([estimate_model(sizes, card, request, stored) for card in cards]))
        return 0
    model_estimate = estimate_model(sizes, divide_among_processes(_requested_machine(args), config), request, stored)
    known = model_estimate.fits or sizes.model_type in WITH_EXPERTS
    smallest_gpu = None if known else find_smallest_gpu(sizes, request, stored, config.tensor_parallel_size)
    if args.picture is not None and model_estimate.fits and not model_estimate.block_bytes:
        raise ConfigError("--picture: an encoder keeps no KV cache that could be drawn")
    if args.picture is not None:
        try:
            args.picture.write_text(draw_estimate(model_estimate, config.model), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--picture: cannot write {args.picture}: {error.strerror}") from None
    fitting_quantization = (
        None if model_estimate.fits else find_fitting_quantization(sizes, model_estimate.machine, request, stored)
    )
    images_plan = None if vision is None else plan_images(args.images, vision, model_estimate)
    if args.json:
        print(json.dumps(estimate_dict(model_estimate, smallest_gpu, images_plan), indent=2))
    else:
        config_flags = ("--config", args.config) if args.config is not None else ()
        print(
            format_text(
                replace(model_estimate, flags=(*config_flags, *model_estimate.flags)),
                config.model,
                smallest_gpu,
                fitting_quantization,
                images_plan,
            )
        )
    return 0 if model_estimate.fits else 1


def _plan_parser() -> argparse.ArgumentParser:
    positive = bounded_number(float, 0, above=True)
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
        "where": ExclusiveFlags(where),
        "--bandwidth": {"type": positive, "metavar": "GB/s", "help": "the device's, if the table lacks it"},
        "--measure": {"action": "store_true", "help": "measure this machine's CPU again"},
        "--tflops": {"type": positive, "metavar": "N", "help": "the device's 16-bit arithmetic, likewise"},
        "--concurrency": {
            "type": bounded_number(int, 1),
            "metavar": "N",
            "help": "requests at once; default: what fits",
        },
        "--images": {"type": parse_images, "metavar": "COUNTxWIDTHxHEIGHT", "help": shown},
        "--json": {"action": "store_true", "help": "print JSON"},
        "--picture": {"type": Path, "metavar": "OUT.svg", "help": "draw memory and what fits"},
    }
    epilog = "All other flags of quire serve mean here what they mean there."
    parser = build_parser("quire plan", __doc__, flags, epilog=epilog)
    for name, action in add_field_flags(parser, ServerConfig, {ServerConfig: "flags of quire serve"}).items():
        if name not in _SHOWN_FLAGS:
            action.help = argparse.SUPPRESS
    context_flag = {"dest": "max_model_len", "metavar": "N", "default": argparse.SUPPRESS, "help": "as --max-model-len"}
    add_flag_table(parser, {"--context": context_flag})
    return parser


def _requested_machine(args: argparse.Namespace) -> Machine:
    if args.gpu is not None:
        machine = find_gpu(args.gpu)
    else:
        machine = this_machine() if args.memory is None else gpu_with_memory(args.memory)
    if (args.bandwidth is None) != (args.tflops is None) and machine.bandwidth is None:
        raise ConfigError("--bandwidth and --tflops go together: a limit needs both")
    if not machine.gpu and args.bandwidth is None and args.tflops is None:
        machine = with_cpu_rates(machine, must_measure=args.measure)
    return replace(
        machine,
        bandwidth=machine.bandwidth if args.bandwidth is None else args.bandwidth * 1e9,
        flops=machine.flops if args.tflops is None else args.tflops * 1e12,
    )
