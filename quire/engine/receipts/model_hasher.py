"""Hashes of a model and its code, for receipts. Weights are hashed only when needed. Files that have changed since
loading get no hash, because the loaded content is unknown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

from quire.engine import VERSION
from quire.engine.checkpoint.model_resolver import read_config_json
from quire.engine.checkpoint.overrides import resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.common.types import EngineInfo
from quire.engine.gguf.model_files import ModelFiles
from quire.engine.receipts.receipt import ComputeInfo, ReceiptHashes
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.tiers.kv_identity import WeightFiles, code_hash


class ModelHasher:
    """Must be constructed before the weights are loaded."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        paths: Mapping[str, str | None],
        hash_folder: Path | None = None,
    ) -> None:
        """`paths`: see EngineCoreClient.weights_paths."""
        self._config = config
        self._tokenizer = tokenizer
        self._paths = paths
        self._hash_folder = hash_folder
        self._files: dict[str, WeightFiles | None] = {"1": _weight_files_or_none(config)}
        self._weight_hashes: dict[str, asyncio.Task[str | None]] = {}
        self._fixed_hashes: asyncio.Task[tuple[str, str, str, str]] | None = None

    def remember_weight_files(self, version: str) -> None:
        """Call when the engine starts to use this version."""
        self._files[version] = self._weight_files_of_version(version)
        self._weight_hashes.pop(version, None)

    async def get_receipt_hashes(self, versions: Iterable[str]) -> ReceiptHashes:
        config, tokenizer, template, _ = await self._get_fixed_hashes()
        weights = {version: await self._weights_hash(version) for version in dict.fromkeys(versions)}
        return ReceiptHashes(config=config, tokenizer=tokenizer, template=template, weights=weights)

    async def describe_compute(self, info: EngineInfo) -> ComputeInfo:
        config, (*_, kernels) = self._config, await self._get_fixed_hashes()
        return ComputeInfo(
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

    async def _get_fixed_hashes(self) -> tuple[str, str, str, str]:
        if self._fixed_hashes is None:
            self._fixed_hashes = asyncio.create_task(
                asyncio.to_thread(hash_all_but_weights, self._config, self._tokenizer)
            )
        return await asyncio.shield(self._fixed_hashes)

    async def _weights_hash(self, version: str) -> str | None:
        if version not in self._files:
            self.remember_weight_files(version)
        if version not in self._weight_hashes:
            self._weight_hashes[version] = asyncio.create_task(asyncio.to_thread(self._hash_weights, version))
        return await asyncio.shield(self._weight_hashes[version])

    def _hash_weights(self, version: str) -> str | None:
        files = self._files[version]
        if version == "1" and version not in self._paths and self._config.load_format == "dummy":
            return f"dummy-{self._config.seed}"
        content_hash = None if files is None else files.content_hash(self._hash_folder)
        return None if content_hash is None else content_hash.hex()

    def _weight_files_of_version(self, version: str) -> WeightFiles | None:
        """None if the weights came as tensors or the files were deleted."""
        if (path := self._paths.get(version)) is None:
            return None
        return _weight_files_or_none(self._config.model_copy(update={"weights": path, "load_format": "auto"}))


def _weight_files_or_none(config: EngineConfig) -> WeightFiles | None:
    try:
        return WeightFiles(config)
    except ModelError:
        return None


def hash_all_but_weights(config: EngineConfig, tokenizer: Tokenizer) -> tuple[str, str, str, str]:
    model = read_config_json(ModelFiles(resolve_model_with_overrides(config)))
    tokenizer_text = f"{tokenizer.backend.to_str()}{tokenizer.eos_token_ids}"
    return _hash_json(model), _hash_json(tokenizer_text), _hash_json(tokenizer.chat_templates), code_hash().hex()


def _hash_json(content: object) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
