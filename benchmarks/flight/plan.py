from __future__ import annotations

CALLS = (
    {
        "machine": 15.0,
        "arrivals": 110.0,
        "everything": 60.0,
        "models": 90.0,
        "large": 70.0,
        "drafts": 45.0,
        "compiling": 45.0,
        "products": 50.0,
        "ranks": 5.0,
        "tests": 50.0,
    },
    {"flash4": 60.0, "http": 35.0, "kernels": 35.0, "images": 30.0, "cores": 20.0},
)
"""Maximum seconds per stage, for a machine that is lent for 540 and then at most 180 seconds. What matters most is
first. Unused time goes to later stages, then to second runs. Stages are independent.
"""
PLAN = {name: seconds for call in CALLS for name, seconds in call.items()}
