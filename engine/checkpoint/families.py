"""The model families that Quire serves. No torch."""

from __future__ import annotations

FAMILIES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
"""config.json's model_type to the module of engine/models whose `spec` reads such a file."""
