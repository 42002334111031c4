"""Limits of latent attention."""

from __future__ import annotations

MAX_ROPE_DIM = 512
"""Numbers of a rotated key, as kernels/cpu/mla/latent_store.cpp has room for."""
