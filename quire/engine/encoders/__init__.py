"""Encoders and vision towers."""
