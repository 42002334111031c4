"""Several models, each with an engine, at one address and within one memory limit."""
