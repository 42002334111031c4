"""What a GPU prepares before the engine says that it is ready, so that no first request waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from quire.engine.core.executor import Executor
from quire.engine.errors import QuireError
from quire.engine.worker.loading.drafts.started import Drafting
from quire.engine.worker.runner import ModelRunner
from quire.kernels.gpu.faults import fault


def warm_up(
    runner: Executor,
    seconds: float,
    step_tokens: int,
    drafting: Drafting | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Compile every kind of kernel that a step of up to so many tokens may launch, and what drafts, however long that
    takes; run the sampler's and those of short prompts; then capture graphs, those of decodes first and those of
    guesses last, until all are there or the time is over; what is left is done in idle moments. No capture is cut
    short. Returns notes on it; none where there are no graphs.
    """
    if not isinstance(runner, ModelRunner) or runner.graphs is None:
        return []
    on_gpu = seconds > 0 and runner.model.device.type == "cuda"
    notes = compile_ahead(runner, step_tokens, drafting, clock) if on_gpu else []
    began = clock()
    if seconds > 0:
        runner.warm_sampler()
        runner.warm_prompts()
    free = torch.cuda.mem_get_info(runner.model.device)[0] if on_gpu else 0
    while clock() - began < seconds and (runner.warm_up() or (drafting is not None and drafting.warm_up())):
        pass
    decodes, prompts, guesses = runner.graphs, runner.prompt_graphs, None if drafting is None else drafting.graphs
    counts = [f"{decodes.progress} decode graphs"]
    if prompts is not None and prompts.captured.graphs:
        counts.append(f"{len(prompts.captured.graphs)} of steps with prompts")
    if guesses is not None:
        counts.append(f"{guesses.progress} of guesses")
    told = ", and ".join(counts) + "," * (len(counts) > 1) + f" captured in {clock() - began:.1f} s"
    if on_gpu:
        told += f"; they take {(free - torch.cuda.mem_get_info(runner.model.device)[0]) / 2**20:.0f} MiB"
    notes += [told, *decodes.captured.notes("decodes of {} rows"), *decodes.behind.notes("heads beside {} rows")]
    if prompts is not None:
        notes += prompts.captured.notes("steps with prompts of {} tokens")
        notes += prompts.behind.notes("heads beside prompts of {} tokens")
    return notes + ([] if guesses is None else guesses.captured.notes("guesses of {} rows"))


def compile_ahead(
    runner: ModelRunner, step_tokens: int, drafting: Drafting | None, clock: Callable[[], float]
) -> list[str]:
    """Notes on the kernels that were compiled, if some were missing. What fails here may work, or be explained, when a
    step needs it."""
    if find_spec("triton") is None:
        return []
    began = clock()
    try:
        compiled = runner.compile_kernels(step_tokens, drafting)
    except QuireError:  # a rank has ended
        raise
    except Exception as error:
        return [f"kernels are compiled when steps first need them: {fault(error)}"]
    return [f"in {clock() - began:.1f} s {compiled.said}"] if compiled.count or compiled.failed else []
