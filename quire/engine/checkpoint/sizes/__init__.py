"""Parameters, cached values and parameters read per step."""
