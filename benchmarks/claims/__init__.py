"""Measures published claims on paged attention, continuous batching and related mechanisms, each against its
switch-off.

`python -m benchmarks.claims [NAME ...]`. docs/claims.md has the results, and why they differ from the papers'.
"""
