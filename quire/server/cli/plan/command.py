"""`quire plan`: what fits where and how fast it can be at most, from config.json alone, without GPU or weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.model_catalog import find_catalog_entry
from quire.engine.checkpoint.model_resolver import needs_download
from quire.engine.checkpoint.mtp_names import make_main_model_filter
from quire.engine.checkpoint.overrides import merge_overrides, read_raw_config_with_overrides
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size
from quire.engine.common.errors import ConfigError, HubUnreachable
from quire.server.cli.flags import ExclusiveFlags, add_flag_table, build_parser
from quire.server.cli.models.table import catalog_config_and_weights
from quire.server.cli.plan.cpu_rates import with_cpu_rates
from quire.server.cli.plan.estimate import Estimate, PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.images_plan import load_required_vision_spec, parse_image_count_and_size, plan_images
from quire.server.cli.plan.machine import Machine, detect_machine, find_gpu, generic_gpu_with_memory, read_gpu_table
from quire.server.cli.plan.model_plan import (
    build_plan_request,
    divide_machine_by_config_parallelism,
    find_fitting_quantization,
    find_smallest_gpu,
    model_sizes_with_served_context,
)
from quire.server.cli.plan.plan_report import estimate_dict, format_gpu_table, format_report
from quire.server.cli.plan.svg_chart import draw_estimate_svg
from quire.server.cli.settings_flags import add_flag_per_field, bounded_number, parse_settings
from quire.server.config import ServerConfig

_SHOWN_FLAGS = (
    "revision",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nnodes",
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "quantize_embedding",
    "gpu_memory_utilization",
    "kv_offload_memory",
    "kv_offload_dir",
    "kv_offload_disk",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "speculative_config",
)


@dataclass(frozen=True, slots=True)
class _ModelToPlan:
    raw: dict[str, Any]
    folder: Path | None
    """None if the model's files are not on this machine."""
    sizes: ModelSizes
    stored: CheckpointSize | None


def main(argv: Sequence[str], started: float) -> int:
    """Return 0 if the model fits, else 1."""
    args, config = parse_settings(_build_plan_parser(), argv, ServerConfig, "name")
    _check_flags(args, config)
    if "max_loras" in vars(args):
        config = config.model_copy(update={"enable_lora": True})
    model = _read_model(config)
    request = build_plan_request(config, model.raw, model.folder, args.concurrency)
    vision = None
    if args.images is not None:
        vision = load_required_vision_spec(config.model, config.revision, model.raw, model.folder)
    if args.gpu == "all":
        if vision is not None:
            raise ConfigError("--images: of one machine, not of --gpu all")
        _print_table(config, model, request)
        return 0
    machine = divide_machine_by_config_parallelism(_requested_machine(args), config)
    estimate = estimate_model(model.sizes, machine, request, model.stored)
    smallest_gpu = None
    if not estimate.fits and not model.sizes.num_experts:
        smallest_gpu = find_smallest_gpu(model.sizes, request, model.stored, config.tensor_parallel_size)
    if args.picture is not None:
        _write_picture(args.picture, estimate, config.model)
    fitting_quantization = None
    if not estimate.fits:
        fitting_quantization = find_fitting_quantization(model.sizes, estimate.machine, request, model.stored)
    images_plan = None if vision is None else plan_images(args.images, vision, estimate)
    if args.json:
        print(json.dumps(estimate_dict(estimate, smallest_gpu, images_plan), indent=2))
    else:
        config_flags = () if args.config is None else ("--config", args.config)
        estimate = replace(estimate, flags=(*config_flags, *estimate.flags))
        print(format_report(estimate, config.model, smallest_gpu, fitting_quantization, images_plan))
    return 0 if estimate.fits else 1


def _check_flags(args: argparse.Namespace, config: ServerConfig) -> None:
    if args.picture is not None and args.picture.suffix.lower() != ".svg":
        raise ConfigError(f"--picture: draws an SVG; {args.picture.with_suffix('.svg')} would be its name")
    if config.num_kv_blocks is not None:
        raise ConfigError("num_kv_blocks: the plan computes how many fit: leave it out, or give --kv-cache-memory")
    if config.kv_offload_disk is not None and config.kv_offload_dir is None:
        raise ConfigError("--kv-offload-disk: is the limit of --kv-offload-dir DIR, which is not given")


def _read_model(config: ServerConfig) -> _ModelToPlan:
    entry = find_catalog_entry(config.model)
    if entry is not None and needs_download(config.model, config.revision):
        raw, stored = catalog_config_and_weights(entry)
        raw = merge_overrides(raw, config.hf_overrides or {})
        return _ModelToPlan(raw, None, model_sizes_with_served_context(config, raw), stored)
    try:
        raw, folder = read_raw_config_with_overrides(config)
    except HubUnreachable as error:
        raise HubUnreachable(f"{error}; `quire plan` needs only the model's config.json") from None
    sizes = model_sizes_with_served_context(config, raw)
    stored = None if folder is None else read_checkpoint_size(folder, make_main_model_filter(sizes.num_layers))
    return _ModelToPlan(raw, folder, sizes, stored)


def _print_table(config: ServerConfig, model: _ModelToPlan, request: PlanRequest) -> None:
    gpus = [divide_machine_by_config_parallelism(gpu, config) for gpu in read_gpu_table().values()]
    print(format_gpu_table([estimate_model(model.sizes, gpu, request, model.stored) for gpu in gpus]))


def _write_picture(file: Path, estimate: Estimate, name: str) -> None:
    if estimate.fits and not estimate.block_bytes:
        raise ConfigError("--picture: an encoder keeps no KV cache that could be drawn")
    try:
        file.write_text(draw_estimate_svg(estimate, name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--picture: cannot write {file}: {error.strerror}") from None


def _build_plan_parser() -> argparse.ArgumentParser:
    positive = bounded_number(float, 0, above=True)
    where = {
        "--gpu": {"metavar": "NAME", "help": "a GPU by name, or all; default: this machine"},
        "--memory": {"type": positive, "metavar": "GiB", "help": "a GPU with this much memory"},
    }
    model = "directory, config.json, .gguf file, hub id or short name; default: that of --config, or the embedded model"
    config = "TOML file of quire serve's settings, or a preset; flags override it"
    shown = "images of a request, such as 1x1024x1024, to count their tokens and memory"
    flags = {
        "name": {"nargs": "?", "metavar": "MODEL", "help": model},
        "--config": {"metavar": "FILE", "help": config},
        "where": ExclusiveFlags(where),
        "--bandwidth": {
            "type": positive,
            "metavar": "GB/s",
            "help": "memory bandwidth of the device, if the table lacks it",
        },
        "--measure": {"action": "store_true", "help": "measure this machine's CPU again"},
        "--tflops": {
            "type": positive,
            "metavar": "N",
            "help": "16-bit arithmetic of the device, if the table lacks it",
        },
        "--concurrency": {
            "type": bounded_number(int, 1),
            "metavar": "N",
            "help": "number of requests at once; default: what fits",
        },
        "--images": {"type": parse_image_count_and_size, "metavar": "COUNTxWIDTHxHEIGHT", "help": shown},
        "--json": {"action": "store_true", "help": "print JSON"},
        "--picture": {"type": Path, "metavar": "OUT.svg", "help": "draw the memory and what fits as SVG"},
    }
    epilog = "All other flags of quire serve are accepted with the same meaning."
    parser = build_parser("quire plan", __doc__, flags, epilog=epilog)
    for name, action in add_flag_per_field(parser, ServerConfig, {ServerConfig: "flags of quire serve"}).items():
        if name not in _SHOWN_FLAGS:
            action.help = argparse.SUPPRESS
    context_flag = {"dest": "max_model_len", "metavar": "N", "default": argparse.SUPPRESS, "help": "as --max-model-len"}
    add_flag_table(parser, {"--context": context_flag})
    return parser


def _requested_machine(args: argparse.Namespace) -> Machine:
    if args.gpu is not None:
        machine = find_gpu(args.gpu)
    else:
        machine = detect_machine() if args.memory is None else generic_gpu_with_memory(args.memory)
    if (args.bandwidth is None) != (args.tflops is None) and machine.bandwidth is None:
        raise ConfigError("--bandwidth and --tflops go together: a limit needs both")
    if not machine.gpu and args.bandwidth is None and args.tflops is None:
        machine = with_cpu_rates(machine, must_measure=args.measure)
    return replace(
        machine,
        bandwidth=machine.bandwidth if args.bandwidth is None else args.bandwidth * 1e9,
        flops=machine.flops if args.tflops is None else args.tflops * 1e12,
    )
