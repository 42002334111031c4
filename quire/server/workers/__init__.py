"""Processes for work on bodies that takes long, may never end, or may fill the memory."""
