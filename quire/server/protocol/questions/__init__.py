"""Bodies of calls that ask questions of a model, answered by probabilities."""
