"""What would help a model that does not fit: fewer bits, or another GPU, or several."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.checkpoint.families import WITH_EXPERTS
from quire.engine.checkpoint.safetensors import StoredWeights
from quire.engine.checkpoint.sizes import ModelSizes
from quire.server.cli.plan.estimate import Wishes, estimate
from quire.server.cli.plan.machine import Machine, read_cards

_COUNTS = (1, 2, 4, 8)
"""Numbers of devices that `cheapest` tries."""


def cheapest(sizes: ModelSizes, wishes: Wishes, stored: StoredWeights | None, at_least: int = 1) -> Machine | None:
    """The GPU of the table with the least memory on which the model fits, or several such GPUs, `at_least` so many;
    None if none do."""
    cards = sorted(read_cards().values(), key=lambda card: (card.memory, card.bandwidth or 0.0))
    for count in (each for each in _COUNTS if each >= at_least):
        for card in cards:
            machine = replace(card, count=count)
            if estimate(sizes, machine, wishes, stored).fits:
                return machine
    return None


def lighter(sizes: ModelSizes, machine: Machine, wishes: Wishes, stored: StoredWeights | None) -> str | None:
    """The --quantization with which the model fits there, the one that changes it least; None if none does."""
    config = wishes.config
    if config.at_load is not None or sizes.quantization or sizes.model_type in WITH_EXPERTS:
        return None
    for name in ("int8", "int4"):
        fewer = replace(wishes, config=config.model_copy(update={"quantization": name}))
        if estimate(sizes, machine, fewer, stored).fits:
            return name
    return None
