"""What is said of paged attention, continuous batching and their kin, measured: each against its own switch-off.

`python -m benchmarks.claims [NAME ...]`. docs/claims.md has a run's table, and why figures differ from the papers'.
"""
