"""The process's served models and their services."""
