"""Processes for work on request bodies that takes long, may never end, or may fill the memory."""
