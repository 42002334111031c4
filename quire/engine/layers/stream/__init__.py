"""Parts of layers beside attention and MLPs, of families whose residual stream is more than a sum (Gemma 4)."""
