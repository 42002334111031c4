"""Families with latent attention: each as it differs from another."""
