from __future__ import annotations

MAX_ROPE_DIM = 512
"""Bound of kernels/cpu/mla/latent_store.cpp."""
