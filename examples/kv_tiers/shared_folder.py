"""A custom KV tier: a folder shared by several servers, such as a network file system.

quire serve --kv-offload-tier shared_folder:make, with this file's folder in PYTHONPATH and SHARED_PAGES set. Anyone who
can read the folder can read the blocks, so it must be as private as the prompts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_SECONDS = 5.0
"""Most age of the list of stored blocks: the engine asks between two steps and must not wait for a network."""


class SharedFolder:
    name = "shared"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()
        self._looked = 0.0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def lookup(self, digest: bytes) -> bool:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked, self._known = time.monotonic(), set(os.listdir(self._folder))
        return digest.hex() in self._known

    def fetch(self, digest: bytes) -> bytes | None:
        try:
            return (self._folder / digest.hex()).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, digest: bytes, page: bytes | memoryview) -> None:
        new = self._folder / f"new-{os.getpid()}-{digest.hex()}"
        new.write_bytes(page)
        new.rename(self._folder / digest.hex())
        self._known.add(digest.hex())

    def drop(self, digest: bytes | None) -> None:
        for name in self._known.copy() if digest is None else [digest.hex()]:
            (self._folder / name).unlink(missing_ok=True)
            self._known.discard(name)


def make(identity: bytes) -> SharedFolder:
    """Called once. `identity`: 16 bytes that stand for the model, its weights and its block layout."""
    return SharedFolder(Path(os.environ["SHARED_PAGES"]) / identity.hex())
