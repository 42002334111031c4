"""`quire list`: the models in the hub's cache, which other programs use too: their names, files, sizes and places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.gguf.choice import by_tag
from quire.server.cli.flags import command
from quire.server.cli.unknown_flags import parse_known

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRevisionInfo, HFCacheInfo

_NO_WEIGHTS = "no weights"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A model in the cache."""

    name: str
    """As `quire serve` takes it: OWNER/REPO, of a GGUF model with its tag or file."""
    repo: str
    gguf: bool
    files: Mapping[str, CachedFileInfo]
    """By path in the repository."""
    place: Path
    ref: str
    """Branch, tag or commit that it is of."""

    @property
    def size(self) -> int:
        return sum({file.blob_path: file.size_on_disk for file in self.files.values()}.values())

    @property
    def has_weights(self) -> bool:
        return any(path.endswith((".gguf", ".safetensors", ".bin", ".pt")) for path in self.files)


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status."""
    parse_known(command("quire list", __doc__, {}), argv)
    cache = cached()
    found = [] if cache is None else sorted(models(cache), key=lambda each: (each.name, each.ref))
    if not found:
        from huggingface_hub import constants

        print(f"nothing is downloaded to {constants.HF_HUB_CACHE}; `quire pull OWNER/REPO` downloads a model")
        return 0
    rows = [("NAME", "FILES", "SIZE", "WHERE"), *map(_row, found)]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, files, much, where in rows:
        print(f"{name:<{wide[0]}}  {files:>{wide[1]}}  {much:>{wide[2]}}  {where}")
    return 0


def _row(model: Downloaded) -> tuple[str, str, str, str]:
    name = model.name if model.ref == "main" else f"{model.name} ({model.ref})"
    return name, str(len(model.files)) if model.has_weights else _NO_WEIGHTS, size(model.size), str(model.place)


def cached() -> HFCacheInfo | None:
    """The hub's cache; None where there is none yet."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def models(cache: HFCacheInfo) -> Iterator[Downloaded]:
    """All downloaded models, in no order; each revision counts as one."""
    for repo in cache.repos:
        if repo.repo_type == "model":
            for revision in repo.revisions:
                yield from _of_revision(repo.repo_id, revision)


def _of_revision(repo: str, revision: CachedRevisionInfo) -> Iterator[Downloaded]:
    ref = "main" if "main" in revision.refs else min(revision.refs, default=revision.commit_hash[:8])
    place = revision.snapshot_path
    files = {file.file_path.relative_to(place).as_posix(): file for file in revision.files}
    left = dict(files)
    for tag, several in by_tag(files).items():
        for paths in several:
            name = f"{repo}:{tag}" if len(several) == 1 else f"{repo}/{paths[0]}"
            own = {path: left.pop(path) for path in paths}
            yield Downloaded(name, repo, True, own, place / paths[0], ref)
    if left and (len(left) == len(files) or any(path.endswith(".safetensors") for path in left)):
        yield Downloaded(repo, repo, False, left, place, ref)


def size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
