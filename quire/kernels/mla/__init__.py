"""Latent attention in plain PyTorch: linears of single heads."""
