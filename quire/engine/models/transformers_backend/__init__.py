"""Runs transformers' model classes on Quire's KV blocks, like vLLM's `--model-impl transformers`.

A class runs once on meta tensors (probe.py) to find what its layers store in KV blocks. Quire's linears, norms, RoPE
and experts replace those of the class if they compute the same function.
"""
