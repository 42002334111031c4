"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 30.0,
    "compiling": 90.0,
    "kernels": 50.0,
    "models": 100.0,
    "images": 70.0,
    "large": 100.0,
    "products": 45.0,
    "http": 35.0,
    "ranks": 20.0,
    "cores": 20.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""
