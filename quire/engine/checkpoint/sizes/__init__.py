"""The sizes of a model: parameters, what attention caches, what a step reads."""
