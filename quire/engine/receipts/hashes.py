"""What a receipt says of the model and of what computes it.

The content of weights is read once, at about a second for each GiB, when the first receipt needs it. Files that were
changed meanwhile have no hash: nobody knows any more what was loaded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from quire.engine import VERSION
from quire.engine.checkpoint.overrides import model_path
from quire.engine.config import EngineConfig
from quire.engine.errors import ModelError
from quire.engine.gguf.files import ModelFiles
from quire.engine.receipts.receipt import Computed, Hashes
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.tiers.identity import WeightFiles, code_hash
from quire.engine.types import EngineInfo


class ModelHashes:
    """The hashes of one engine's model, for as long as it runs; made before its weights are loaded."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        paths: Mapping[str, str | None],
        memory: Path | None = None,
    ) -> None:
        """`paths`: see Link.weights_paths; `memory`: a folder that remembers the hashes of weights."""
        self._config = config
        self._tokenizer = tokenizer
        self._paths = paths
        self._memory = memory
        self._files: dict[str, WeightFiles | None] = {"1": _weight_files(config)}
        """By version."""
        self._known: dict[str, asyncio.Task[str | None]] = {}
        self._rest: asyncio.Task[tuple[str, str, str, str]] | None = None

    def note(self, version: str) -> None:
        """Weights of this version are computed with from now on: remember which files these are."""
        self._files[version] = self._files_of(version)
        self._known.pop(version, None)

    async def of(self, versions: Iterable[str]) -> Hashes:
        """With those of these versions of the weights."""
        config, tokenizer, template, _ = await self._parts()
        weights = {version: await self._weights(version) for version in dict.fromkeys(versions)}
        return Hashes(config=config, tokenizer=tokenizer, template=template, weights=weights)

    async def computed(self, info: EngineInfo) -> Computed:
        config, (*_, kernels) = self._config, await self._parts()
        return Computed(
            quire=VERSION,
            kernels=kernels,
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            quantization=config.quantization,
            quantize_embedding=config.quantize_embedding,
            kv_cache_dtype=info.kv_cache_dtype,
            activation_bits=config.activation_bits,
            rope_context=info.rope_context,
            tensor_parallel_size=config.tensor_parallel_size,
            deterministic=info.deterministic,
        )

    async def _parts(self) -> tuple[str, str, str, str]:
        """The hashes of config.json, tokenizer, template and code."""
        if self._rest is None:
            self._rest = asyncio.create_task(asyncio.to_thread(hashes_beside, self._config, self._tokenizer))
        return await asyncio.shield(self._rest)

    async def _weights(self, version: str) -> str | None:
        if version not in self._files:
            self.note(version)
        if version not in self._known:
            self._known[version] = asyncio.create_task(asyncio.to_thread(self._hash, version))
        return await asyncio.shield(self._known[version])

    def _hash(self, version: str) -> str | None:
        files = self._files[version]
        if version == "1" and version not in self._paths and self._config.load_format == "dummy":
            return f"dummy-{self._config.seed}"
        found = None if files is None else files.hash(self._memory)
        return None if found is None else found.hex()

    def _files_of(self, version: str) -> WeightFiles | None:
        """None where they were given as tensors, or are not there any more."""
        if (path := self._paths.get(version)) is None:
            return None
        return _weight_files(self._config.model_copy(update={"weights": path, "load_format": "auto"}))


def _weight_files(config: EngineConfig) -> WeightFiles | None:
    """None where they are not there any more."""
    try:
        return WeightFiles(config)
    except ModelError:
        return None


def hashes_beside(config: EngineConfig, tokenizer: Tokenizer) -> tuple[str, str, str, str]:
    """Of config.json, the tokenizer, its chat templates, and the code of kernels, layers and models."""
    model = ModelFiles(model_path(config)).json("config.json")
    written = f"{tokenizer.backend.to_str()}{tokenizer.eos_token_ids}"
    return _hash(model), _hash(written), _hash(tokenizer.chat_templates), code_hash().hex()


def _hash(content: object) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
