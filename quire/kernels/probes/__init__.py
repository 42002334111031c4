"""Small trials of what a model computes, run on a device before a backend is chosen."""
