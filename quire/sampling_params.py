"""vLLM's module of this name."""

from typing import TYPE_CHECKING

from quire.engine.offline.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]

if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        if name == "GuidedDecodingParams":  # in programs for older vLLM; an AttributeError's text is not shown
            raise ImportError("GuidedDecodingParams: use StructuredOutputsParams, as SamplingParams.structured_outputs")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
