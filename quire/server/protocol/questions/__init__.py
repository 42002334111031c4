"""Bodies of questions that are answered by probabilities."""
