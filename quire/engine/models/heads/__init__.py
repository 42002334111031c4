"""Draft heads."""
