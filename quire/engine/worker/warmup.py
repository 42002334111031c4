from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from statistics import median

from quire.engine.checkpoint.kv_cache_plan import DRIVER_BYTES_PER_GRAPH
from quire.engine.common.errors import QuireError
from quire.engine.common.executor import Executor
from quire.engine.worker.device_memory import measure_gpu_memory
from quire.engine.worker.loading.drafts.device_drafter import DeviceDrafter
from quire.engine.worker.model_runner import ModelRunner
from quire.kernels.device.error_messages import describe_kernel_error


@dataclass(frozen=True, slots=True)
class WarmupResult:
    notes: list[str]
    graph_bytes: int = 0
    """Bytes of all graphs, including those still to be captured; 0 if not measured."""


def warm_up_runner(
    runner: Executor,
    seconds: float,
    step_tokens: int,
    drafter: DeviceDrafter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> WarmupResult:
    """`seconds` limits the capture of graphs, decodes first, and not the compilation of kernels. The remaining graphs
    are captured in idle moments. If `seconds` is 0, nothing is compiled.
    """
    if not isinstance(runner, ModelRunner) or runner.decode_graphs is None:
        return WarmupResult([])
    on_gpu = seconds > 0 and runner.model.device.type == "cuda"
    notes = precompile_kernels(runner, step_tokens, drafter, clock) if on_gpu else []
    began = clock()
    if seconds > 0:
        runner.warm_sampler()
        runner.warm_prompts()
    free = [measure_gpu_memory(runner.model.device)] if seconds > 0 else []
    while clock() - began < seconds and (
        runner.warm_up_next() or (drafter is not None and drafter.capture_next_graph())
    ):
        free.append(measure_gpu_memory(runner.model.device))
    decodes = runner.decode_graphs
    prompts = runner.mixed_batch_graphs
    drafts = None if drafter is None else drafter.graphs
    counts = [f"{decodes.capture_progress} decode graphs"]
    if prompts is not None and prompts.graph_set.graphs:
        counts.append(f"{len(prompts.graph_set.graphs)} of steps with prompts")
    if drafts is not None:
        counts.append(f"{drafts.capture_progress} of drafts")
    summary = ", and ".join(counts) + "," * (len(counts) > 1) + f" captured in {clock() - began:.1f} s"
    captured = [max(before.free - after.free, 0) for before, after in pairwise(free) if before and after]
    if captured:
        summary += f"; they take {sum(captured) / 2**20:.0f} MiB"
    notes += [
        summary,
        *decodes.graph_set.failure_notes("decodes of {} rows"),
        *decodes.draft_head_graphs.failure_notes("heads beside {} rows"),
    ]
    if prompts is not None:
        notes += prompts.graph_set.failure_notes("steps with prompts of {} tokens")
        notes += prompts.draft_head_graphs.failure_notes("heads beside prompts of {} tokens")
    if drafts is not None:
        notes += drafts.graph_set.failure_notes("drafts of {} rows")
    num_missing = sum(each.num_missing for each in (decodes, prompts, drafts) if each is not None)
    return WarmupResult(notes, total_graph_bytes(captured, num_missing))


def total_graph_bytes(captured: Sequence[int], num_missing: int) -> int:
    """A pool's first graph takes the pool's buffers, so a missing graph counts as the median of the later graphs. The
    median ignores most memory that other programs take meanwhile.
    """
    if not captured:
        return 0
    later = captured[1:] or [DRIVER_BYTES_PER_GRAPH]
    return sum(captured) + num_missing * int(median(later))


def precompile_kernels(
    runner: ModelRunner, step_tokens: int, drafter: DeviceDrafter | None, clock: Callable[[], float]
) -> list[str]:
    """A kernel that fails here may work when a step needs it. If not, that step explains the error."""
    if find_spec("triton") is None:
        return []
    began = clock()
    try:
        compiled = runner.compile_kernels(step_tokens, drafter)
    except QuireError:  # a rank has ended
        raise
    except Exception as error:
        return [f"kernels are compiled when steps first need them: {describe_kernel_error(error)}"]
    return [f"in {clock() - began:.1f} s {compiled.summary}"] if compiled.num_compiled or compiled.num_failed else []
