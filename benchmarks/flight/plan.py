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
"""Most seconds per stage, shortest first; unused time goes to later stages, then to second runs. Stages are
independent.
"""
