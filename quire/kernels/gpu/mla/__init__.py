"""Latent attention on a GPU: what is stored, attention over pages of latents, and linears of single heads."""
