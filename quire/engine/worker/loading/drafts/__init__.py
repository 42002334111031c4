"""Loads drafters with weights."""
