"""`quire rm`: deletes downloaded models from the hub's cache, and prints what that frees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.checkpoint.hub_names import ANY_GGUF
from quire.engine.checkpoint.model_resolver import resolve_hub_name
from quire.engine.common.errors import ModelError
from quire.engine.gguf.model_files import PACKAGED_MODELS
from quire.engine.unsupported_options import suggest_nearest
from quire.server.cli.flags import build_parser
from quire.server.cli.models.downloaded import DownloadedModel, format_size, iterate_downloads, scan_hub_cache
from quire.server.cli.unknown_flags import parse_flags

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo


def main(argv: Sequence[str], started: float) -> int:
    names = "as `quire list` prints it; OWNER/REPO is all of that repository"
    args = parse_flags(
        build_parser("quire rm", __doc__, {"names": {"nargs": "+", "metavar": "MODEL", "help": names}}), argv
    )
    for name in args.names:
        print(f"{name}: {format_size(remove_model(name))} freed")
    return 0


def remove_model(name: str) -> int:
    """Returns the bytes freed. Raises ModelError."""
    if Path(name).expanduser().exists():
        raise ModelError(f"model: {name} is a path, not a name: only downloaded models are deleted")
    if name in PACKAGED_MODELS:
        raise ModelError(f"model: {name} is in a package: pip uninstall {PACKAGED_MODELS[name][2].partition('==')[0]}")
    requested, cache = resolve_hub_name(name), scan_hub_cache()
    downloads = (
        []
        if cache is None
        else [each for each in iterate_downloads(cache) if each.repo.lower() == requested.repo.lower()]
    )
    chosen = downloads
    if requested.file is not None:
        chosen = [each for each in downloads if requested.file in each.files]
    elif requested.tag == ANY_GGUF:
        chosen = [each for each in downloads if each.is_gguf]
    elif requested.tag is not None:
        chosen = [each for each in downloads if each.name.lower() == f"{requested.repo}:{requested.tag}".lower()]
    if cache is None or not chosen:
        every = [] if cache is None else [each.name for each in iterate_downloads(cache)]
        advice = suggest_nearest(name, every) or "`quire list` shows what is"
        raise ModelError(f"model: {name} is not downloaded; {advice}")
    return _delete_downloads(cache, chosen, is_whole_repo=len(chosen) == len(downloads))


def _delete_downloads(cache: HFCacheInfo, chosen: Sequence[DownloadedModel], *, is_whole_repo: bool) -> int:
    if is_whole_repo:
        commits = {
            revision.commit_hash
            for repo in cache.repos
            if repo.repo_type == "model" and repo.repo_id == chosen[0].repo
            for revision in repo.revisions
        }
        strategy = cache.delete_revisions(*commits)
    else:
        strategy = cache.delete_files(*(file for each in chosen for file in each.files.values()))
    strategy.execute()
    return strategy.expected_freed_size
