"""Measures published claims on paged attention, continuous batching and related mechanisms, each against its
switch-off.

`python -m benchmarks.claims [NAME ...]`. docs/explanations/benchmarks.md has a run's table.
"""
