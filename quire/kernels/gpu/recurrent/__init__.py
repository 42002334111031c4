"""States of sequences that are matrices, on a GPU: the rules of kernels/recurrent, token by token and by pieces."""
