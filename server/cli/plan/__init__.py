"""`quire plan`: what fits where, and how fast it can be at most; from config.json alone, without GPU and weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire.engine.checkpoint.files import read_raw_config, read_stored_weights
from quire.engine.checkpoint.sizes import read_sizes
from quire.engine.config import DEMO_MODEL
from quire.engine.errors import ConfigError
from quire.server.cli.plan.estimate import UTILIZATION, Wishes, cheapest, estimate
from quire.server.cli.plan.machine import Machine, find_card, read_cards, this_machine, with_memory
from quire.server.cli.plan.picture import draw
from quire.server.cli.plan.report import as_dict, as_table, as_text
from quire.server.cli.settings import number


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status: 0 if the model fits, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    raw, folder = read_raw_config(args.model, args.revision)
    sizes = read_sizes(raw)
    stored = None if folder is None else read_stored_weights(folder)
    wishes = Wishes(args.dtype, args.context, args.concurrency, args.gpu_memory_utilization)
    if args.gpu == "all":
        cards = [replace(card, count=args.tp) for card in read_cards().values()]
        print(as_table([estimate(sizes, card, wishes, stored) for card in cards]))
        return 0
    made = estimate(sizes, _machine(args), wishes, stored)
    better = None if made.fits else cheapest(sizes, wishes, stored)
    if args.picture is not None:
        args.picture.write_text(draw(made, args.model), encoding="utf-8")
    if args.json:
        print(json.dumps(as_dict(made, better), indent=2))
    else:
        print(as_text(made, args.model, better))
    return 0 if made.fits else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire plan", description=__doc__, allow_abbrev=False)
    positive = number(float, 0, above=True)
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="directory, config.json or hub id; default: the embedded model",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", metavar="NAME", help="a GPU of the table, or all of them; default: this machine")
    where.add_argument("--memory", type=positive, metavar="GiB", help="a GPU of so much memory")
    parser.add_argument("--bandwidth", type=positive, metavar="GB/s", help="the device's, if the table lacks it")
    parser.add_argument("--tflops", type=positive, metavar="N", help="the device's 16-bit arithmetic, likewise")
    parser.add_argument("--tp", type=number(int, 1), default=1, metavar="N", help="devices that share the model")
    parser.add_argument("--context", type=number(int, 1), metavar="N", help="tokens of a request; default: what fits")
    parser.add_argument("--concurrency", type=number(int, 1), metavar="N", help="requests at once; default: what fits")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="weights and KV cache"
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=number(float, 0, 1, above=True),
        default=UTILIZATION,
        metavar="X",
        help=f"share to use (default: {UTILIZATION})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", type=Path, metavar="OUT.svg", help="draw memory and what fits")
    return parser


def _machine(args: argparse.Namespace) -> Machine:
    if args.gpu is not None:
        machine = find_card(args.gpu)
    else:
        machine = this_machine() if args.memory is None else with_memory(args.memory)
    if (args.bandwidth is None) != (args.tflops is None) and machine.bandwidth is None:
        raise ConfigError("--bandwidth and --tflops go together: a limit needs both")
    return replace(
        machine,
        count=args.tp,
        bandwidth=machine.bandwidth if args.bandwidth is None else args.bandwidth * 1e9,
        flops=machine.flops if args.tflops is None else args.tflops * 1e12,
    )
