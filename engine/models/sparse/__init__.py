"""Families with mixtures of experts in an MLP's place."""
