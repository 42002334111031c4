"""MoE on a GPU."""
