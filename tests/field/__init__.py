"""Faults that users reported, one file per report, named by what the user saw."""
