"""Simulates a whole server with clients, engine, disk and clock from one seed: see test_simulation.py."""
