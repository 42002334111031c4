from __future__ import annotations

MAX_ROPE_DIM = 512
"""Maximum of kernels/cpu/mla/latent_store.cpp."""
