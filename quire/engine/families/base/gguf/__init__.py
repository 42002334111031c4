"""How GGUF files name tensors, and what their headers say."""
