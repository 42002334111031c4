"""Towers that read images, and what makes tokens of their patches."""
