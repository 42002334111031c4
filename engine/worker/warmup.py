"""What a GPU prepares before the engine says that it is ready, so that no first request waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.engine.core.executor import Executor
from quire.engine.worker.runner import Runner


def warm_up(runner: Executor, seconds: float, clock: Callable[[], float] = time.monotonic) -> list[str]:
    """Run the sampler's kernels and those of short prompts, and capture decode graphs until all are there or the time
    is over; what is left is done in idle moments. No capture is cut short. Returns notes on it; none where there are no
    graphs.
    """
    if not isinstance(runner, Runner) or runner.graphs is None:
        return []
    began = clock()
    if seconds > 0:
        runner.warm_sampler()
        runner.warm_prompts()
    while clock() - began < seconds and runner.warm_up():
        pass
    notes = [f"{runner.graphs.progress} decode graphs captured in {clock() - began:.1f} s"]
    for reason in dict.fromkeys(runner.graphs.eager.values()):
        sizes = sorted({size for (size, _, _), why in runner.graphs.eager.items() if why == reason})
        notes.append(f"decodes of {', '.join(map(str, sizes))} rows run without graphs: {reason}")
    return notes
