"""Runs transformers' model classes on Quire's KV blocks, like vLLM's `--model-impl transformers`
(vllm/model_executor/models/transformers).

A class is run once on meta tensors (probe.py) to find what its layers keep. Linears, norms, RoPE and experts are
replaced where Quire's are the same function.
"""
