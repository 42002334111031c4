"""Latent attention: what a token keeps, and linears of single heads."""
