"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 40.0,
    "kernels": 120.0,
    "products": 60.0,
    "models": 120.0,
    "large": 120.0,
    "http": 60.0,
    "cores": 40.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""
