"""Several models behind one address, each with an engine of its own, within one bound of memory."""
