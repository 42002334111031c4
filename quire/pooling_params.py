"""Has the name of vLLM's module."""

from quire.engine.common.request_params import PoolingParams

__all__ = ["PoolingParams"]
