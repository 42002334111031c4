"""Sums over ranks whose GPUs reach each other's memory, in one kernel."""
