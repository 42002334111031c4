"""Drafters with weights."""
