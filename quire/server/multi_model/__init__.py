"""Several models at one address, each with an engine, within one memory limit."""
