"""Small trials of what a model computes, on a device."""
