"""`quire plan`: what fits where, and how fast it can be at most; from config.json alone, without GPU and weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from quire.engine.checkpoint.alike.mtp import without_mtp
from quire.engine.checkpoint.families import WITH_EXPERTS
from quire.engine.checkpoint.files import read_raw_config
from quire.engine.checkpoint.kv_plan import KV_CODE_SCALE_BYTES, QUANTIZED_BITS
from quire.engine.checkpoint.safetensors import read_stored_weights
from quire.engine.checkpoint.sizes import read_sizes
from quire.engine.config import DISK_GIB, Stored
from quire.engine.errors import ConfigError
from quire.engine.lora.modules import planned_modules
from quire.engine.settings.reader import load
from quire.server.cli.plan.configured import wishes_of
from quire.server.cli.plan.drafts import planned_draft, speculative_config
from quire.server.cli.plan.estimate import UTILIZATION, Wishes, estimate
from quire.server.cli.plan.images import images, planned_images, vision_of
from quire.server.cli.plan.machine import Machine, divided, find_card, read_cards, this_machine, with_memory
from quire.server.cli.plan.picture import draw
from quire.server.cli.plan.rates import with_rates
from quire.server.cli.plan.report import as_dict, as_table, as_text
from quire.server.cli.plan.ways_out import cheapest, lighter
from quire.server.cli.settings import add_fields, number
from quire.server.cli.unknown_flags import parse_known
from quire.server.config import ServerConfig


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status: 0 if the model fits, else 1."""
    parser = _parser()
    args = parse_known(parser, argv)
    if args.picture is not None and args.picture.suffix.lower() != ".svg":
        raise ConfigError(f"--picture: draws an SVG; {args.picture.with_suffix('.svg')} would be its name")
    config = _config(args)
    model = args.model or config.model
    args.tp = args.tp or config.tensor_parallel_size
    args.dp = args.dp or config.data_parallel_size
    args.pp = args.pp or config.pipeline_parallel_size
    args.nnodes = args.nnodes or config.nnodes
    raw, folder = read_raw_config(model, args.revision or config.revision)
    sizes = read_sizes(raw)
    stored = None if folder is None else read_stored_weights(folder, without_mtp(sizes.num_layers))
    wishes = _wishes(args, config, raw, folder)
    vision = None if args.images is None else vision_of(model, args.revision or config.revision, raw, folder)
    if args.gpu == "all" and vision is not None:
        raise ConfigError("--images: of one machine, not of --gpu all")
    if args.gpu == "all":
        cards = [divided(card, args.tp, args.dp, args.pp, args.nnodes) for card in read_cards().values()]
        print(as_table([estimate(sizes, card, wishes, stored) for card in cards]))
        return 0
    made = estimate(sizes, _machine(args), wishes, stored)
    better = None if made.fits or sizes.model_type in WITH_EXPERTS else cheapest(sizes, wishes, stored, args.tp)
    if args.picture is not None and made.fits and not made.page_bytes:
        raise ConfigError("--picture: an encoder keeps no KV cache that could be drawn")
    if args.picture is not None:
        try:
            args.picture.write_text(draw(made, model), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--picture: cannot write {args.picture}: {error.strerror}") from None
    light = None if made.fits else lighter(sizes, made.machine, wishes, stored)
    shown = None if vision is None else planned_images(args.images, vision, made)
    if args.json:
        print(json.dumps(as_dict(made, better, shown), indent=2))
    else:
        told = ("--config", args.config) if args.config is not None else ()
        print(as_text(replace(made, flags=(*told, *made.flags)), model, better, light, shown))
    return 0 if made.fits else 1


def _config(args: argparse.Namespace) -> ServerConfig:
    """The settings as `quire serve` would have them; how many processes there are is the machine's to say."""
    known = ServerConfig.model_fields.keys() - {"model", "nnodes"}
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    if args.tp is not None:
        given["tensor_parallel_size"] = args.tp
    config = load(ServerConfig, given, args.config)
    if config.num_kv_blocks is not None:
        raise ConfigError("num_kv_blocks: a plan says how many fit: leave it out, or give --kv-cache-memory")
    return config


def _wishes(args: argparse.Namespace, config: ServerConfig, raw: dict[str, Any], folder: Path | None) -> Wishes:
    """What the flags ask for, and else the settings of --config."""
    if config.kv_offload_disk is not None and config.kv_offload_dir is None:
        raise ConfigError("--kv-offload-disk: says how much --kv-offload-dir DIR may take, which is not given")
    asked = {"context": args.context, "concurrency": args.concurrency}
    wishes = replace(wishes_of(config), **{name: value for name, value in asked.items() if value is not None})
    max_loras = config.max_loras if args.max_loras or config.enable_lora else 0
    wishes = replace(wishes, draft=planned_draft(config.speculative_config, raw, folder))
    if not max_loras:
        return wishes
    return replace(
        wishes,
        modules=planned_modules(raw),
        max_loras=max_loras,
        max_cpu_loras=config.max_cpu_loras,
        max_lora_rank=config.max_lora_rank,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire plan", description=__doc__, allow_abbrev=False)
    positive = number(float, 0, above=True)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="directory, config.json, .gguf file, hub id or short name; default: what --config names, or embedded",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of quire serve's settings, or a preset; flags go before it"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", metavar="NAME", help="a GPU of the table, or all of them; default: this machine")
    where.add_argument("--memory", type=positive, metavar="GiB", help="a GPU of so much memory")
    parser.add_argument("--bandwidth", type=positive, metavar="GB/s", help="the device's, if the table lacks it")
    parser.add_argument("--measure", action="store_true", help="measure this machine's CPU again")
    parser.add_argument("--tflops", type=positive, metavar="N", help="the device's 16-bit arithmetic, likewise")
    _add_processes(parser)
    length = ("--max-model-len", "--context")
    parser.add_argument(
        *length, dest="context", type=_length, metavar="N", help="tokens of a request; default: what fits"
    )
    parser.add_argument("--concurrency", type=number(int, 1), metavar="N", help="requests at once; default: what fits")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), help="weights and KV cache; default: auto"
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", *KV_CODE_SCALE_BYTES), help="the KV cache, in 8 bits")
    _add_quantization(parser)
    parser.add_argument(
        "--gpu-memory-utilization",
        type=number(float, 0, 1, above=True),
        metavar="X",
        help=f"share to use (default: {UTILIZATION})",
    )
    parser.add_argument("--kv-offload-memory", type=positive, metavar="GiB", help="of the host's, for earlier KV")
    parser.add_argument("--kv-offload-dir", metavar="DIR", help="for earlier KV on a disk")
    parser.add_argument(
        "--kv-offload-disk", type=positive, metavar="GiB", help=f"that it may take (default: {DISK_GIB})"
    )
    parser.add_argument("--max-loras", type=number(int, 1, 256), metavar="N", help="adapters in one step")
    parser.add_argument("--max-cpu-loras", type=number(int, 1), metavar="N", help="adapters in a host's memory")
    parser.add_argument("--max-lora-rank", type=number(int, 1, 256), metavar="N", help="their largest rank")
    parser.add_argument(
        "--speculative-config", type=speculative_config, metavar="JSON", help="as of quire serve: what guesses tokens"
    )
    parser.add_argument(
        "--images", type=images, metavar="COUNTxWIDTHxHEIGHT", help="of a request, as 1x1024x1024: what they take"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="OUT.svg", help="draw memory and what fits")
    parser.epilog = "All other flags of quire serve mean here what they mean there."
    for action in add_fields(parser, ServerConfig, {ServerConfig: "flags of quire serve"}).values():
        action.help = argparse.SUPPRESS
    return parser


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    kinds, named = (*QUANTIZED_BITS, *get_args(Stored)), f"{{{','.join(QUANTIZED_BITS)}}}"
    parser.add_argument("--quantization", choices=kinds, metavar=named, help="of the weights at load")
    parser.add_argument(
        "--quantize-embedding",
        action=argparse.BooleanOptionalAction,
        help="embedding and head to int8 at load; default: with --quantization",
    )


def _length(text: str) -> int:
    """As --max-model-len reads it: 32k, 32K."""
    try:
        return ServerConfig(max_model_len=text).max_model_len or 0
    except ValidationError as error:
        raise argparse.ArgumentTypeError(error.errors()[0]["msg"].lower()) from None


def _add_processes(parser: argparse.ArgumentParser) -> None:
    ranks = ("--tensor-parallel-size", "--tp")
    parser.add_argument(
        *ranks, dest="tp", type=number(int, 1, 64), metavar="N", help="GPUs, or processes, that share the model"
    )
    stages = ("--pipeline-parallel-size", "--pp")
    parser.add_argument(
        *stages, dest="pp", type=number(int, 1, 64), metavar="N", help="GPUs, or processes, that share out the layers"
    )
    replicas = ("--data-parallel-size", "--dp")
    parser.add_argument(
        *replicas, dest="dp", type=number(int, 1, 32), metavar="N", help="engines that share the requests"
    )
    parser.add_argument("--nnodes", type=number(int, 1, 64), metavar="N", help="machines like this one that share it")


def _machine(args: argparse.Namespace) -> Machine:
    if args.gpu is not None:
        machine = find_card(args.gpu)
    else:
        machine = this_machine() if args.memory is None else with_memory(args.memory)
    if (args.bandwidth is None) != (args.tflops is None) and machine.bandwidth is None:
        raise ConfigError("--bandwidth and --tflops go together: a limit needs both")
    if not machine.gpu and args.bandwidth is None and args.tflops is None:
        machine = with_rates(machine, again=args.measure)
    machine = replace(
        machine,
        bandwidth=machine.bandwidth if args.bandwidth is None else args.bandwidth * 1e9,
        flops=machine.flops if args.tflops is None else args.tflops * 1e12,
    )
    return divided(machine, args.tp, args.dp, args.pp, args.nnodes)
