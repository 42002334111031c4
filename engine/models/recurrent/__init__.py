"""Families with selective state spaces (Mamba 2) or selective scans (Mamba), alone or in most layers."""
