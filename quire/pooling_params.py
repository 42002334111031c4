"""vLLM's module of this name."""

from quire.engine.common.types import PoolingParams

__all__ = ["PoolingParams"]
