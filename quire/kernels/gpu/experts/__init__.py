"""Mixtures of experts on a GPU: rows are sorted by expert on the device, a product is one kernel for all."""
