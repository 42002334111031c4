"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 40.0,
    "kernels": 110.0,
    "products": 50.0,
    "models": 100.0,
    "images": 80.0,
    "large": 100.0,
    "http": 50.0,
    "cores": 30.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""
