"""Models by transformers' own classes, where no file of ours serves a family: the class computes, and its attention
goes to our pages.

A class is built without weights and run once on tensors that have shapes alone (probe.py): so it says itself what its
layers keep. Its linears, norms, rotations and experts become ours where that is the same function. vLLM's
`--model-impl transformers` does the same (vllm/model_executor/models/transformers)."""
