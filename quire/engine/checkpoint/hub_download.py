"""Selects and verifies files of the Hugging Face hub. The hub's own client downloads and caches them."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from quire.engine.checkpoint.hub_errors import check_disk_space, translate_hub_errors
from quire.engine.checkpoint.hub_names import ANY_GGUF, HubName
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import MIB
from quire.engine.gguf.file_selection import PREFERRED_TAG, group_models_by_tag, select_files
from quire.engine.gguf.header import read_header_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_PICKLE_PATTERNS = ("pytorch_model.bin", "pytorch_model-*.bin")
_HEADER_CHUNK_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class HubFile:
    size: int
    sha256: str | None
    """None for small files, which git stores."""


@dataclass(frozen=True, slots=True)
class RepoListing:
    files: Mapping[str, HubFile | None]
    """Values are None if the hub is unreachable and the cache is listed."""
    commit: str

    @property
    def has_only_gguf_weights(self) -> bool:
        suffixes = {PurePosixPath(path).suffix.lower() for path in self.files}
        return ".gguf" in suffixes and ".safetensors" not in suffixes

    @property
    def pickle_patterns(self) -> tuple[str, ...]:
        return () if any(path.endswith(".safetensors") for path in self.files) else _PICKLE_PATTERNS


def download_from_hub(name: HubName, revision: str | None, patterns: Sequence[str], *, refresh: bool = False) -> Path:
    """Return the snapshot's folder, or the first part of its GGUF file. `refresh` asks the hub even for cached GGUF
    files. Raises ModelError.
    """
    revision = name.revision or revision
    if name.wants_gguf and not refresh and (cached := _find_cached_gguf(name, revision)) is not None:
        return cached
    if not name.wants_gguf and not refresh and has_cached_weights(name, revision, (".safetensors",)):
        return download_files(name, revision, patterns)  # the client checks for newer files
    with translate_hub_errors(name, revision):
        listing = list_repo_files(name, revision)
        if not name.wants_gguf and not listing.has_only_gguf_weights:
            return _download_snapshot(name, revision, listing, [*patterns, *listing.pickle_patterns])
        files = select_gguf_files(name, listing)
        return _download_snapshot(name, revision, listing, [glob.escape(file) for file in files]) / files[0]


def download_files(name: HubName, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    with translate_hub_errors(name, revision):
        return Path(snapshot_download(name.repo, revision=name.revision or revision, allow_patterns=list(patterns)))


def select_gguf_files(name: HubName, listing: RepoListing) -> list[str]:
    """Raises ModelError."""
    models = group_models_by_tag(listing.files)
    if name.file is None:
        return select_files(models, None if name.tag in (None, ANY_GGUF) else name.tag, name.repo)
    for files in (files for file_lists in models.values() for files in file_lists):
        if name.file in files:
            return files
    raise ModelError(f"model: {name.repo} has no GGUF file {name.file}, or not all its parts")


def list_repo_files(name: HubName, revision: str | None) -> RepoListing:
    """Lists the cache if the hub is unreachable. Raises the client's errors."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError

    try:
        info: ModelInfo = HfApi().model_info(name.repo, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        raise
    except (HfHubHTTPError, HTTPError, OSError):
        folder = _find_cached_snapshot(name, revision)
        if folder is None:
            raise
        paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return RepoListing(dict.fromkeys(paths), folder.name)
    files = {
        each.rfilename: HubFile(each.size or 0, None if each.lfs is None else each.lfs.sha256)
        for each in info.siblings or ()
    }
    return RepoListing(files, info.sha or "")


def _download_snapshot(name: HubName, revision: str | None, listing: RepoListing, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    matching_paths = filter_repo_objects(listing.files, allow_patterns=list(patterns))
    cached_snapshot = _find_cached_snapshot(name, listing.commit)
    new_files = {
        path: file
        for path in matching_paths
        if (file := listing.files[path]) and not (cached_snapshot and (cached_snapshot / path).is_file())
    }
    check_disk_space(name, sum(file.size for file in new_files.values()))
    folder = Path(snapshot_download(name.repo, revision=revision, allow_patterns=list(patterns)))
    if folder.name == listing.commit:
        for path, file in new_files.items():
            _verify_sha256(folder / path, file, name.repo)
    return folder


def _verify_sha256(path: Path, file: HubFile, repo: str) -> None:
    """Deletes the file if its digest differs."""
    if file.sha256 is None:
        return
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ModelError(
            f"model: {repo}: {path.name} came with the SHA-256 {digest[:12]}…, but the hub says {file.sha256[:12]}…; "
            "it is deleted: try again"
        )


def _find_cached_snapshot(name: HubName, revision: str | None) -> Path | None:
    from huggingface_hub import constants  # this import takes 10 ms, the client's a second

    repo = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    revision_name = revision or constants.DEFAULT_REVISION
    ref = repo / "refs" / revision_name
    if re.fullmatch(r"[\w./-]+", revision_name) is None or ".." in revision_name:
        return None
    commit = ref.read_text().strip() if ref.is_file() else revision_name
    folder = repo / "snapshots" / commit
    return folder if folder.is_dir() else None


def _find_cached_gguf(name: HubName, revision: str | None) -> Path | None:
    folder = _find_cached_snapshot(name, revision)
    if folder is None:
        return None
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.is_file()]
    exact_name = HubName(name.repo, PREFERRED_TAG) if name.tag == ANY_GGUF else name
    try:
        return folder / select_gguf_files(exact_name, RepoListing(dict.fromkeys(paths), folder.name))[0]
    except ModelError:
        return None


def has_cached_weights(
    name: HubName, revision: str | None, suffixes: tuple[str, ...] = (".safetensors", ".gguf", ".bin")
) -> bool:
    """For a GGUF model, all its files must be cached."""
    if name.wants_gguf:
        return _find_cached_gguf(name, name.revision or revision) is not None
    folder = _find_cached_snapshot(name, name.revision or revision)
    return folder is not None and any(path.suffix in suffixes for path in folder.rglob("*"))


def fetch_config(name: HubName, revision: str | None, config_files: Sequence[str], target_dir: Path) -> Path:
    """For a GGUF model, downloads only headers, into sparse files of full size in `target_dir`, and returns the first
    file. Otherwise ignores missing files, and returns their folder. Raises ModelError.
    """
    revision = name.revision or revision
    with translate_hub_errors(name, revision):
        listing = list_repo_files(name, revision)
        if not name.wants_gguf and not listing.has_only_gguf_weights:
            return _download_snapshot(name, revision, listing, config_files)
        files = select_gguf_files(name, listing)
        for path in files:
            _fetch_gguf_header(name, listing, path, target_dir)
    return target_dir / PurePosixPath(files[0]).name


def _fetch_gguf_header(name: HubName, listing: RepoListing, path: str, target_dir: Path) -> None:
    file = listing.files[path]
    target = target_dir / PurePosixPath(path).name
    if file is None:  # only the cache has the file
        folder = _find_cached_snapshot(name, listing.commit)
        assert folder is not None
        target.symlink_to(folder / path)
        return
    content = read_header_bytes(_HubRangeReader(name.repo, path, listing.commit), target, file.size)
    with target.open("wb") as out:
        out.write(content)
        out.truncate(file.size)


class _HubRangeReader:
    def __init__(self, repo: str, path: str, commit: str) -> None:
        from huggingface_hub import hf_hub_url

        self._url = hf_hub_url(repo, path, revision=commit)
        self._offset = 0

    def read(self, length: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        last = self._offset + max(length, _HEADER_CHUNK_BYTES) - 1
        headers = build_hf_headers() | {"Range": f"bytes={self._offset}-{last}", "Accept-Encoding": "identity"}
        with get_session().stream("GET", self._url, headers=headers, follow_redirects=True) as answer:
            if answer.status_code == 200:  # the hub ignored Range and sends the whole file
                raise ModelError("model: this hub serves no byte ranges; `quire pull` downloads the whole file")
            content = answer.read()
            hf_raise_for_status(answer)
        self._offset += len(content)
        return content
