"""Families with LayerNorms: parallel blocks, MLPs without gates, learned positions, ALiBi."""
