from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.engine.common.errors import ConfigError
from quire.server.cli.bench.latency_stats import PERCENTILES, BenchSummary, LatencyDistribution, percentile
from quire.server.cli.flags import FlagGroup

LATENCY_TITLES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between tokens",
    "tpot_ms": "per output token",
    "e2e_ms": "end to end",
}
TEXT_COLOR = "#333333"
LINE_COLOR = "#2a6f97"
MARK_COLOR = "#c1440e"


_FLAGS = {
    "--label": {"default": "", "metavar": "TEXT", "help": "name of this run, shown in every report"},
    "--json": {"type": Path, "metavar": "OUT.json", "help": "write settings and results as JSON"},
}
_PNG = {"--png": {"type": Path, "metavar": "OUT.png", "help": "plot the latencies; needs matplotlib"}}
REPORT_FLAGS, DRAWN_REPORT_FLAGS = {"report": FlagGroup(_FLAGS)}, {"report": FlagGroup(_FLAGS | _PNG)}


def check_report_paths(json_path: Path | None, png_path: Path | None = None) -> None:
    """Raises ConfigError, also if matplotlib is missing for `png_path`."""
    for path in (json_path, png_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: no such directory")
    if png_path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--png needs matplotlib, which is not installed: pip install matplotlib, or quire-llm[bench]")


def write_json(path: Path, args: argparse.Namespace, figures: Mapping[str, Any]) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings.pop("api_key", None)
    path.write_text(json.dumps({"settings": settings, **figures}, indent=2) + "\n", encoding="utf-8")


def print_table(title: str, summary: BenchSummary) -> None:
    print(title)
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in (
        ("output tokens/s", f"{summary.output_tokens_per_second:.1f}"),
        ("total tokens/s", f"{summary.total_tokens_per_second:.1f}"),
        ("requests/s", f"{summary.requests_per_second:.2f}"),
        ("tokens", f"{summary.prompt_tokens} in, {summary.output_tokens} out, in {summary.seconds:.2f} s"),
        ("requests", f"{summary.requests} answered, {summary.failed} failed"),
    ):
        facts.add_row(name, value)
    print_without_trailing_blanks(facts)
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    table = Table(box=None, pad_edge=False)
    table.add_column("milliseconds", min_width=19)
    for column in columns:
        table.add_column(column, justify="right")
    for name, text in LATENCY_TITLES.items():
        values: LatencyDistribution | None = getattr(summary, name)
        if values is not None:
            table.add_row(text, *(f"{getattr(values, column):.2f}" for column in columns))
    if table.row_count:
        print_without_trailing_blanks(table)
    for error, count in summary.errors.items():
        print(f"{count} x {error}")


def print_without_trailing_blanks(table: Table) -> None:
    console = Console()
    with console.capture() as capture:
        console.print(table)
    print(*(line.rstrip() for line in capture.get().splitlines()), sep="\n")


def save_latency_plot(path: Path, title: str, samples: Mapping[str, Sequence[float]]) -> None:
    """Samples are in seconds."""
    from matplotlib.figure import Figure

    shown = {name: sorted(1000 * value for value in samples[name]) for name in ("ttft_ms", "itl_ms", "e2e_ms")}
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title, color=TEXT_COLOR, fontsize=11)
    for axes, (name, values) in zip(figure.subplots(1, len(shown), sharey=True), shown.items(), strict=True):
        axes.set_title(LATENCY_TITLES[name], color=TEXT_COLOR, fontsize=10)
        axes.set_xlabel("milliseconds")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if not values:
            continue
        axes.ecdf(values, color=LINE_COLOR)
        for percent in PERCENTILES:
            value = percentile(values, percent)
            axes.plot(value, percent / 100, "o", color=MARK_COLOR, markersize=4)
            axes.annotate(
                f"p{percent}  {value:.1f}",
                (value, percent / 100),
                xytext=(7, -11),
                textcoords="offset points",
                color=MARK_COLOR,
                fontsize=8,
            )
        axes.set_xlim(0, values[-1] * 1.25)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    figure.savefig(path, dpi=130)
