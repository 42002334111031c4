"""vLLM's module of this name."""

from quire.engine.common.request_params import PoolingParams

__all__ = ["PoolingParams"]
