"""The stages, in the order in which they run, and the seconds that each has at most."""

from __future__ import annotations

PLAN = {
    "machine": 20.0,
    "ranks": 10.0,
    "http": 35.0,
    "compiling": 75.0,
    "kernels": 45.0,
    "products": 65.0,
    "images": 75.0,
    "models": 110.0,
    "large": 95.0,
    "cores": 30.0,
}
"""Together as long as a flight, the short ones first; what one leaves goes to the next ones, and at last to second
runs. None needs what another one did: kernels that nobody compiled before are compiled when they are needed."""
