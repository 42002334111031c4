"""Runs transformers' model classes on Quire's KV blocks, like vLLM's `--model-impl transformers`.

A class runs once on meta tensors (probe.py) to find what its layers keep. Quire's linears, norms, RoPE and experts
replace the class's if they are the same function.
"""
