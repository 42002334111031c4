"""Has the name of vLLM's module."""

from quire.engine.offline.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
