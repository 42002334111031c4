"""Exports PoolingParams from a module with vLLM's name, so that programs written for vLLM can import it."""

from quire.engine.common.request_params import PoolingParams

__all__ = ["PoolingParams"]
