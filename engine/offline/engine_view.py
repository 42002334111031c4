"""What programs made for vLLM read of `llm.llm_engine`: enough of its names, and nothing that changes the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine.client.client import EngineClient
from quire.engine.config import EngineConfig
from quire.engine.offline.model import Model
from quire.engine.types import EngineInfo


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int
    """Tokens of a page."""
    num_gpu_blocks: int
    """Pages, on whichever device."""
    enable_prefix_caching: bool


class EngineView:
    def __init__(self, config: EngineConfig, info: EngineInfo, model: Model, client: EngineClient) -> None:
        self.model_config = ModelConfig(
            config.model, config.tokenizer or config.model, info.dtype, info.max_model_len, model.vocab_size
        )
        self.cache_config = CacheConfig(info.block_size, info.num_blocks, config.enable_prefix_caching)
        self._model = model
        self._client = client

    @property
    def vllm_config(self) -> EngineView:
        """vLLM keeps its configs in one; here it is this object."""
        return self

    @property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self._model.tokenizer.for_transformers()

    def get_num_unfinished_requests(self) -> int:
        return self._client.num_open

    def has_unfinished_requests(self) -> bool:
        return self._client.num_open > 0
