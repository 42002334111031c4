"""Processes for work on the bodies of requests that takes long, may never end, or may fill the memory."""
