"""Multimodal families."""
