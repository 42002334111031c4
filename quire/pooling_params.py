"""vLLM's module of this name."""

from quire.engine.types import PoolingParams

__all__ = ["PoolingParams"]
