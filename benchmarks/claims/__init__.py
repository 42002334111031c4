"""What is said of paged attention, continuous batching and their kin, measured: each against its own switch-off.

`python -m benchmarks.claims [NAME ...]`. docs/explanations/benchmarks.md has a run's table.
"""
