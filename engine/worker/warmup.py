"""What a GPU prepares before the engine says that it is ready, so that no first request waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from quire.engine.core.executor import Executor
from quire.engine.errors import QuireError
from quire.engine.worker.graphs.prompts import Kind
from quire.engine.worker.runner import Runner
from quire.kernels.gpu.faults import fault


def warm_up(
    runner: Executor, seconds: float, step_tokens: int, clock: Callable[[], float] = time.monotonic
) -> list[str]:
    """Compile every kind of kernel that a step of up to so many tokens may launch, however long that takes; run the
    sampler's and those of short prompts; then capture graphs, those of decodes first, until all are there or the time
    is over; what is left is done in idle moments. No capture is cut short. Returns notes on it; none where there are no
    graphs.
    """
    if not isinstance(runner, Runner) or runner.graphs is None:
        return []
    notes = compile_ahead(runner, step_tokens, clock) if seconds > 0 and runner.model.device.type == "cuda" else []
    began = clock()
    if seconds > 0:
        runner.warm_sampler()
        runner.warm_prompts()
    measured = seconds > 0 and runner.model.device.type == "cuda"
    free = torch.cuda.mem_get_info(runner.model.device)[0] if measured else 0
    while clock() - began < seconds and runner.warm_up():
        pass
    decodes, prompts = runner.graphs, runner.prompt_graphs
    told = f"{decodes.progress} decode graphs"
    if prompts is not None and prompts.captured.graphs:
        told += f", and {len(prompts.captured.graphs)} of steps with prompts,"
    told += f" captured in {clock() - began:.1f} s"
    if measured:
        told += f"; they take {(free - torch.cuda.mem_get_info(runner.model.device)[0]) / 2**20:.0f} MiB"
    notes.append(told)
    eager = decodes.captured.eager
    for reason in dict.fromkeys(eager.values()):
        sizes = sorted({size for (size, _, _), why in eager.items() if why == reason})
        notes.append(f"decodes of {', '.join(map(str, sizes))} rows run without graphs: {reason}")
    failed: dict[Kind, str] = {} if prompts is None else prompts.captured.eager
    for reason in dict.fromkeys(failed.values()):
        sizes = sorted({kind.total for kind, why in failed.items() if why == reason})
        notes.append(f"steps with prompts of {', '.join(map(str, sizes))} tokens run without graphs: {reason}")
    return notes


def compile_ahead(runner: Runner, step_tokens: int, clock: Callable[[], float]) -> list[str]:
    """Notes on the kernels that were compiled, if some were missing. What fails here may work, or be explained, when a
    step needs it."""
    if find_spec("triton") is None:
        return []
    began = clock()
    try:
        compiled = runner.compile_kernels(step_tokens)
    except QuireError:  # a rank has ended
        raise
    except Exception as error:
        return [f"kernels are compiled when steps first need them: {fault(error)}"]
    return [f"in {clock() - began:.1f} s {compiled.said}"] if compiled.count or compiled.failed else []
