"""GGUF tensor names and metadata of families."""
