"""`quire list`: the models in the hub's cache, shared with other programs: names, files, sizes and places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.gguf.file_selection import group_models_by_tag
from quire.server.cli.flags import build_parser
from quire.server.cli.unknown_flags import parse_flags

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRevisionInfo, HFCacheInfo

_NO_WEIGHTS = "no weights"


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    name: str
    repo: str
    is_gguf: bool
    files: Mapping[str, CachedFileInfo]
    path: Path
    ref: str

    @property
    def size_bytes(self) -> int:
        return sum({file.blob_path: file.size_on_disk for file in self.files.values()}.values())

    @property
    def has_weights(self) -> bool:
        return any(path.endswith((".gguf", ".safetensors", ".bin", ".pt")) for path in self.files)


def main(argv: Sequence[str], started: float) -> int:
    parse_flags(build_parser("quire list", __doc__, {}), argv)
    cache = scan_hub_cache()
    downloads = [] if cache is None else sorted(iterate_downloads(cache), key=lambda each: (each.name, each.ref))
    if not downloads:
        from huggingface_hub import constants

        print(f"nothing is downloaded to {constants.HF_HUB_CACHE}; `quire pull OWNER/REPO` downloads a model")
        return 0
    rows = [("NAME", "FILES", "SIZE", "WHERE"), *map(_model_row, downloads)]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, files, much, where in rows:
        print(f"{name:<{wide[0]}}  {files:>{wide[1]}}  {much:>{wide[2]}}  {where}")
    return 0


def _model_row(model: DownloadedModel) -> tuple[str, str, str, str]:
    name = model.name if model.ref == "main" else f"{model.name} ({model.ref})"
    return (
        name,
        str(len(model.files)) if model.has_weights else _NO_WEIGHTS,
        format_size(model.size_bytes),
        str(model.path),
    )


def scan_hub_cache() -> HFCacheInfo | None:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def iterate_downloads(cache: HFCacheInfo) -> Iterator[DownloadedModel]:
    for repo in cache.repos:
        if repo.repo_type == "model":
            for revision in repo.revisions:
                yield from _models_of_revision(repo.repo_id, revision)


def _models_of_revision(repo: str, revision: CachedRevisionInfo) -> Iterator[DownloadedModel]:
    ref = "main" if "main" in revision.refs else min(revision.refs, default=revision.commit_hash[:8])
    place = revision.snapshot_path
    files = {file.file_path.relative_to(place).as_posix(): file for file in revision.files}
    other_files = dict(files)
    for tag, several in group_models_by_tag(files).items():
        for paths in several:
            name = f"{repo}:{tag}" if len(several) == 1 else f"{repo}/{paths[0]}"
            own = {path: other_files.pop(path) for path in paths}
            yield DownloadedModel(name, repo, True, own, place / paths[0], ref)
    if other_files and (len(other_files) == len(files) or any(path.endswith(".safetensors") for path in other_files)):
        yield DownloadedModel(repo, repo, False, other_files, place, ref)


def format_size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
