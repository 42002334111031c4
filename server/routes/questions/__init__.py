"""Calls that ask questions of a model, answered by probabilities."""
