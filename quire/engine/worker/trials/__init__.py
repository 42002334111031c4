"""What a GPU's kernels must compute correctly before they serve."""
