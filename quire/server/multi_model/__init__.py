"""Several models at one address, each with its own engine, within one limit of memory."""
