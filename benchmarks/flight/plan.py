"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 25.0,
    "compiling": 75.0,
    "kernels": 50.0,
    "models": 100.0,
    "images": 70.0,
    "large": 95.0,
    "products": 65.0,
    "http": 35.0,
    "ranks": 15.0,
    "cores": 30.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""
