"""Faults that users reported: a file for each report, whose docstring says what the user saw."""
