"""Measures published claims on paged attention, continuous batching and related mechanisms, each against its
switch-off.

`python -m benchmarks.claims [NAME ...]`. docs/internals/lab-notes/published-claims.md has a run's table.
"""
