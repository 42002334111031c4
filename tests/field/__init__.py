"""Faults that users reported, one file a report, named by what a user saw."""
