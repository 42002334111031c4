"""Small trials of a model's operations on a device."""
