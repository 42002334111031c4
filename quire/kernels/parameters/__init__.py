"""What kernels are told beside tensors: choices and numbers, which a model's architecture consists of too. No torch."""
