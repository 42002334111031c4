"""vLLM's module of this name."""

from quire.engine.offline.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
