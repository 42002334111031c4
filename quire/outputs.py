"""Exports the types of outputs from a module with vLLM's name, so that programs written for vLLM can import them."""

from quire.engine.offline.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]
