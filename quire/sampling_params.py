"""Has the name of vLLM's module."""

from typing import TYPE_CHECKING

from quire.engine.offline.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every name

    def __getattr__(name: str) -> object:
        if name == "GuidedDecodingParams":  # older vLLM programs import it; importing hides an AttributeError's text
            raise ImportError("GuidedDecodingParams: use StructuredOutputsParams, as SamplingParams.structured_outputs")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
