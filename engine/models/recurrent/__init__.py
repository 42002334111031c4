"""Families with selective state spaces (Mamba 2), alone or in most layers."""
