"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 30.0,
    "compiling": 110.0,
    "kernels": 60.0,
    "models": 120.0,
    "large": 130.0,
    "products": 50.0,
    "http": 35.0,
    "cores": 25.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""
