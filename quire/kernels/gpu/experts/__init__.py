"""MoE on a GPU: rows are sorted by expert on the device, and one kernel multiplies for all experts."""
