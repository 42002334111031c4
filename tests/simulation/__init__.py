"""A whole server with its clients, engine, disk and clock, all driven by one seed: see test_simulation.py."""
