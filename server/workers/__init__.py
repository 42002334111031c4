"""Processes that do the work on callers' bodies which takes long, may never end, or may fill the memory."""
