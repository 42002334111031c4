"""What a page of KV depends on beside its tokens, as 16 bytes: pages of another identity are not read.

The weights count by the content of their files, not by their name or version. Reading them once takes about a second
for each GiB, so the hash is kept beside the pages, with the files' sizes, times and inodes.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.checkpoint.safetensors import weight_files
from quire.engine.config import EngineConfig
from quire.engine.gguf.files import SUFFIX, without_part

log = logging.getLogger("quire.tiers")

_CODE = (".py", ".so", ".cpp", ".h")
_SAMPLES, _SAMPLE_BYTES = 1024, 4096
"""Pieces of a model's files, and how long each is."""
_LEAST_SAMPLES = 16
"""Of each file, however many there are."""
_PART = 64 * 2**20
"""Bytes that are hashed at a time, each part in a thread."""
_THREADS = 4
_MEMORY = "weights.json"
_MOST_REMEMBERED = 64

Stamp = tuple[str, int, int, int, int, int]


def identity_of(config: EngineConfig, model: ModelConfig, weights: bytes, layout: str) -> bytes:
    """`weights`: their hash; `layout`: see PageMover. The code that computes keys and values counts too."""
    asked = (
        config.at_load,
        config.quantize_embedding,
        config.dtype,
        config.kv_cache_dtype,
        config.deterministic,
        config.activation_bits,
    )
    draft = None if config.speculative_config is None else config.speculative_config.model_dump_json()
    parts = (repr(model), weights.hex(), layout, code_hash().hex(), repr(asked), draft, config.load_format, config.seed)
    return blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def content_of(model: ModelConfig, files: WeightFiles | None) -> str:
    """What tells a model from another one in the same place, and is the same wherever it lies: a digest of config.json
    and of samples of its weights. "" where these are in no file, or changed while they were loaded."""
    if files is None or (sample := files.sample()) is None:
        return ""
    raw = json.dumps(model.raw, sort_keys=True, default=repr)
    return blake2b(sample + raw.encode(), digest_size=12).hexdigest()


def code_hash() -> bytes:
    """Of what computes keys and values: kernels, layers and models, as they are installed."""
    engine = Path(__file__).resolve().parent.parent
    found = blake2b(digest_size=16)
    for folder in (engine.parent / "kernels", engine / "layers", engine / "models"):
        for file in sorted(each for each in folder.rglob("*") if each.suffix in _CODE):
            content = file.read_bytes()
            found.update(f"{file.name}:{len(content)}:".encode() + content)
    return found.digest()


class WeightFiles:
    """The files of an engine's weights, as they are when this is made; before they are loaded."""

    def __init__(self, config: EngineConfig) -> None:
        self._made_up = config.load_format == "dummy"
        self._seed = config.seed
        self._stamps = [] if self._made_up else _stamps(stored_at(config))

    def sample(self) -> bytes | None:
        """Of their sizes and of pieces spread over them: milliseconds for any size. Another training changes some of
        these pieces; a change of a few rows may go unseen, which `hash` would find. None: as `hash`."""
        if self._made_up:
            return b"%d" % self._seed
        found = blake2b(digest_size=16)
        count = max(_LEAST_SAMPLES, _SAMPLES // max(1, len(self._stamps)))
        for path, size, *_ in self._stamps:
            found.update(b"%d:" % size)
            with suppress(OSError), open(path, "rb") as file:
                for place in range(count):
                    found.update(os.pread(file.fileno(), _SAMPLE_BYTES, size * place // count))
        return found.digest() if self._unchanged() else None

    def _unchanged(self) -> bool:
        """Whether they are there, and as they were when this was made."""
        return bool(self._stamps) and [_stamp(Path(stamp[0])) for stamp in self._stamps] == self._stamps

    def hash(self, memory: Path | None) -> bytes | None:
        """Of their content; None where they have changed since this was made, so that nobody knows what was loaded.
        `memory`: a folder that remembers hashes."""
        if self._made_up:
            return bytes(16)  # of the seed, which the identity has
        if not self._unchanged():
            return None
        key = blake2b(repr(self._stamps).encode(), digest_size=16).hexdigest()
        known = {} if memory is None else _remembered(memory)
        if key in known:
            return bytes.fromhex(known[key])
        with ThreadPoolExecutor(_THREADS) as threads:
            parts = [(path, begin) for path, size, *_ in self._stamps for begin in range(0, size, _PART)]
            found = blake2b(b"".join(threads.map(_part_hash, parts)), digest_size=16)
        if not self._unchanged():
            return None
        if memory is not None:
            _remember(memory, known | {key: found.hexdigest()})
        return found.digest()


def _stamps(path: Path) -> list[Stamp]:
    """Of the files at `path`: a folder's safetensors files, or a GGUF file with its other parts."""
    if path.is_dir():
        return [_stamp(file) for file in weight_files(path)]
    parts = [
        file for file in path.parent.iterdir() if file.suffix == SUFFIX and without_part(file) == without_part(path)
    ]
    return [_stamp(file) for file in sorted(parts)]


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0, 0, 0, 0
    return str(file), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _part_hash(part: tuple[str, int]) -> bytes:
    """With the part's place: the same bytes elsewhere are other weights."""
    path, begin = part
    with open(path, "rb") as file:
        file.seek(begin)
        found = blake2b(f"{Path(path).name}:{begin}:".encode(), digest_size=16)
        found.update(file.read(_PART))
        return found.digest()


def _remembered(memory: Path) -> dict[str, str]:
    """Hashes by the key of their files' stamps; none from a file that is not as it was written."""
    try:
        known = json.loads((memory / _MEMORY).read_text())
        return {key: bytes.fromhex(value).hex() for key, value in known.items() if len(value) == 32}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(memory: Path, known: dict[str, str]) -> None:
    new = memory / f"{_MEMORY}.{os.getpid()}"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(dict(list(known.items())[-_MOST_REMEMBERED:]), file)
        new.rename(memory / _MEMORY)
    except OSError as error:
        log.warning("the hash of the weights is not kept: %s", error.strerror)
