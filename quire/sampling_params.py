"""Exports the sampling parameters from a module with vLLM's name, so that programs written for vLLM can import them."""

from typing import TYPE_CHECKING

from quire.engine.offline.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

if not TYPE_CHECKING:  # type checkers that see `__getattr__` would accept every name

    def __getattr__(name: str) -> object:
        if name == "GuidedDecodingParams":  # older vLLM programs import it; an import hides an AttributeError's text
            raise ImportError("GuidedDecodingParams: use StructuredOutputsParams, as SamplingParams.structured_outputs")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
