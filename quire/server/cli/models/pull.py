"""`quire pull`: downloads models from the hub into the cache shared with other programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quire.engine.checkpoint.model_resolver import needs_download, pull_model
from quire.engine.common.config import EngineConfig
from quire.engine.gguf.file_names import GGUF_SUFFIX, part_paths
from quire.server.cli.flags import build_parser
from quire.server.cli.models.downloaded import format_size
from quire.server.cli.unknown_flags import parse_flags


def main(argv: Sequence[str], started: float) -> int:
    args = parse_flags(
        build_parser(
            "quire pull",
            __doc__,
            {
                "names": {
                    "nargs": "+",
                    "metavar": "MODEL",
                    "help": "OWNER/REPO, OWNER/REPO:TAG, a URL, or a short name",
                },
                "--revision": {"metavar": "TEXT", "help": "branch, tag or commit"},
            },
        ),
        argv,
    )
    for name in args.names:
        path = download_model(name, args.revision)
        files = part_paths(path) if path.suffix == GGUF_SUFFIX else [file for file in path.rglob("*") if file.is_file()]
        print(f"{name}: {format_size(sum(file.stat().st_size for file in files))} in {path}")
    return 0


def pull_configured_model_if_missing(config: EngineConfig) -> None:
    """Runs before the engine starts, so that one process downloads with visible progress. Raises ModelError."""
    if needs_download(config.model, config.revision):
        download_model(config.model, config.revision)


def download_model(name: str, revision: str | None) -> Path:
    """Raises ModelError."""
    if not sys.stderr.isatty():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        print(f"downloading {name}", file=sys.stderr, flush=True)
    return pull_model(name, revision)
