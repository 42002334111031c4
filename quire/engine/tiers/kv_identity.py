"""A 16-byte fingerprint of everything except tokens that a KV block depends on.

Weights are identified by their content. Hashing takes about a second per GiB, so hashes are stored together with the
files' sizes, times and inodes.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.tensor_headers import find_weight_files
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.gguf.file_names import GGUF_SUFFIX, model_stem

log = logging.getLogger("quire.tiers")

_CODE_SUFFIXES = (".py", ".so", ".cpp", ".h")
_NUM_SAMPLES, _SAMPLE_BYTES = 1024, 4096
"""Samples of all weight files together, and bytes per sample."""
_MIN_SAMPLES_PER_FILE = 16
"""Each file has at least this many, even if the total then exceeds _NUM_SAMPLES."""
_PART_BYTES = 64 * 2**20
_THREADS = 4
_HASHES_FILE = "weights.json"
_MAX_REMEMBERED = 64

FileStamp = tuple[str, int, int, int, int, int]


def compute_identity(config: EngineConfig, model: ModelConfig, weights: bytes, layout: str) -> bytes:
    """The identity also covers the code of kernels, layers and models."""
    settings = (
        config.online_quantization,
        config.quantize_embedding,
        config.dtype,
        config.kv_cache_dtype,
        config.deterministic,
        config.activation_bits,
    )
    draft = None if config.speculative_config is None else config.speculative_config.model_dump_json()
    parts = (
        repr(model),
        weights.hex(),
        layout,
        code_hash().hex(),
        repr(settings),
        draft,
        config.load_format,
        config.seed,
    )
    return blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def model_sample_digest(model: ModelConfig, files: WeightFiles | None) -> str:
    """A digest that does not depend on the path. "" if no file has the weights, or if files changed while loading."""
    if files is None or (sample := files.sample_digest()) is None:
        return ""
    raw = json.dumps(model.raw, sort_keys=True, default=repr)
    return blake2b(sample + raw.encode(), digest_size=12).hexdigest()


@cache
def code_hash() -> bytes:
    """Computed once per process, because the process keeps running the code that it loaded."""
    hasher = blake2b(digest_size=16)
    for folder in numeric_code_folders():
        for file in sorted(each for each in folder.rglob("*") if each.suffix in _CODE_SUFFIXES):
            content = file.read_bytes()
            hasher.update(f"{file.name}:{len(content)}:".encode() + content)
    return hasher.digest()


def numeric_code_folders() -> list[Path]:
    engine = Path(__file__).resolve().parent.parent
    folders = ("architecture", "encoders", "families", "layers", "models")
    return [engine.parent / "kernels", *(engine / folder for folder in folders)]


class WeightFiles:
    """Must be constructed before loading, because it records sizes, times and inodes of the files."""

    def __init__(self, config: EngineConfig) -> None:
        self._is_dummy = config.load_format == "dummy"
        self._seed = config.seed
        self._stamps = [] if self._is_dummy else _file_stamps(resolve_weights(config))

    def sample_digest(self) -> bytes | None:
        """Another training changes it, but a change of a few rows may not. None if files changed."""
        if self._is_dummy:
            return b"%d" % self._seed
        hasher = blake2b(digest_size=16)
        num_samples = max(_MIN_SAMPLES_PER_FILE, _NUM_SAMPLES // max(1, len(self._stamps)))
        for path, size, *_ in self._stamps:
            hasher.update(b"%d:" % size)
            with suppress(OSError), open(path, "rb") as file:
                for index in range(num_samples):
                    hasher.update(os.pread(file.fileno(), _SAMPLE_BYTES, size * index // num_samples))
        return hasher.digest() if self._are_files_unchanged() else None

    def _are_files_unchanged(self) -> bool:
        return bool(self._stamps) and [_file_stamp(Path(stamp[0])) for stamp in self._stamps] == self._stamps

    def content_hash(self, hash_folder: Path | None) -> bytes | None:
        """None if files changed."""
        if self._is_dummy:
            return bytes(16)  # dummy weights: the identity includes their seed
        if not self._are_files_unchanged():
            return None
        key = blake2b(repr(self._stamps).encode(), digest_size=16).hexdigest()
        known_hashes = {} if hash_folder is None else _read_hashes(hash_folder)
        if key in known_hashes:
            return bytes.fromhex(known_hashes[key])
        with ThreadPoolExecutor(_THREADS) as threads:
            parts = [(path, begin) for path, size, *_ in self._stamps for begin in range(0, size, _PART_BYTES)]
            hasher = blake2b(b"".join(threads.map(_hash_file_part, parts)), digest_size=16)
        if not self._are_files_unchanged():
            return None
        if hash_folder is not None:
            _write_hashes(hash_folder, known_hashes | {key: hasher.hexdigest()})
        return hasher.digest()


def _file_stamps(path: Path) -> list[FileStamp]:
    if path.is_dir():
        return [_file_stamp(file) for file in find_weight_files(path)]
    parts = [
        file for file in path.parent.iterdir() if file.suffix == GGUF_SUFFIX and model_stem(file) == model_stem(path)
    ]
    return [_file_stamp(file) for file in sorted(parts)]


def _file_stamp(file: Path) -> FileStamp:
    try:
        status = file.stat()
    except OSError:
        return str(file), 0, 0, 0, 0, 0
    return str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


def _hash_file_part(part: tuple[str, int]) -> bytes:
    """The hash includes the part's position, because the same bytes elsewhere are other weights."""
    path, begin = part
    with open(path, "rb") as file:
        file.seek(begin)
        hasher = blake2b(f"{Path(path).name}:{begin}:".encode(), digest_size=16)
        hasher.update(file.read(_PART_BYTES))
        return hasher.digest()


def _read_hashes(hash_folder: Path) -> dict[str, str]:
    try:
        hashes = json.loads((hash_folder / _HASHES_FILE).read_text())
        return {key: bytes.fromhex(value).hex() for key, value in hashes.items() if len(value) == 32}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_hashes(hash_folder: Path, hashes: dict[str, str]) -> None:
    temporary = hash_folder / f"{_HASHES_FILE}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(dict(list(hashes.items())[-_MAX_REMEMBERED:]), file)
        temporary.rename(hash_folder / _HASHES_FILE)
    except OSError as error:
        log.warning("the hash of the weights cannot be saved: %s", error.strerror)
