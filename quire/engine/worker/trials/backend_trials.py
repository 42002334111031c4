"""Trials that a GPU backend must pass before it is chosen, or its steps are captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.common.config import EngineConfig
from quire.engine.models.requirements import (
    distinct_attention_specs,
    has_chunked_attention,
    has_sinks,
    make_dummy_recurrence_params,
)
from quire.engine.worker.graphs.graph_capture import CudaGraphCapture
from quire.engine.worker.kernel_compilation.kernel_cache import trial_verdict_folder
from quire.engine.worker.trials.child_trials import ChildTrials
from quire.engine.worker.trials.trial_verdicts import describe_machine
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import BackendTrial
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend
from quire.kernels.gpu.other_devices import is_other_device
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES
from quire.kernels.probes.backend_probe import GraphCapture, PagedAttentionProbe, find_first_failure
from quire.kernels.probes.mla_probe import MLAProbe
from quire.kernels.probes.recurrence_probe import RecurrenceProbe
from quire.kernels.probes.serial_context_parallel import SerialContextParallel
from quire.kernels.reference import ReferenceBackend


def make_child_trials(
    config: EngineConfig, device: torch.device, get_driver: Callable[[], str | None], progress: Callable[[], None]
) -> ChildTrials | None:
    """A backend named by --attention-backend is tried again even if it failed before."""
    if device.type != "cuda":
        return None
    return ChildTrials(
        trial_verdict_folder(),
        lambda: describe_machine(device, get_driver()),
        progress,
        retry_failures=config.attention_backend != "auto",
    )


def choose_trials(
    config: EngineConfig,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    spec: DecoderSpec,
    child_trials: ChildTrials | None = None,
) -> list[BackendTrial]:
    """The trials run decodes in a CUDA graph, then without graphs. Without `child_trials`, libraries are tried in this
    process.
    """
    if device.type == "cpu":
        return []
    captures: list[GraphCapture | None] = (
        [None] if config.enforce_eager or is_other_device(device) else [CudaGraphCapture(device), None]
    )
    ranks = config.decode_context_parallel_size
    first, *others = (_make_trial(types, device, spec, capture, child_trials, ranks=ranks) for capture in captures)
    return [first, *(partial(_disable_graphs_if_trial_passes, trial) for trial in others)]


def _disable_graphs_if_trial_passes(trial: BackendTrial, backend: Backend) -> str | None:
    """Called after a trial in a graph has failed."""
    if (why := trial(backend)) is None:
        backend.cuda_graph_support = "nothing"
    return why


def find_eager_prefill_reason(
    config: EngineConfig,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    spec: DecoderSpec,
    backend: Backend,
    child_trials: ChildTrials | None = None,
) -> str | None:
    """Either the backend rules prefills out, or a library's attention fails in a graph. `types`: compute and KV
    dtype.
    """
    if backend.cuda_graph_support != "steps":
        return f"{backend.name} computes prompts with looks at the host"
    if config.enforce_eager or not choose_trials(config, device, types, spec):
        return None
    ranks = config.decode_context_parallel_size
    capture = CudaGraphCapture(device)
    return _make_trial(types, device, spec, capture, child_trials, ranks=ranks, prompts=True)(backend)


def _make_trial(
    types: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    spec: DecoderSpec,
    capture: GraphCapture | None,
    child_trials: ChildTrials | None,
    *,
    ranks: int = 1,
    prompts: bool = False,
) -> BackendTrial:
    """`ranks`: with more than one, also try context parallelism. `prompts`: try only prefills in a graph, and only the
    attention of libraries.
    """
    dtype, kv_dtype = types
    windowed = any(each.window for each in spec.kv_cache_specs)
    trials = list[BackendTrial]()
    attention_probes = list[PagedAttentionProbe]()
    for part in distinct_attention_specs(spec):
        if isinstance(part, MLALayerSpec) and prompts:
            continue  # Triton computes MLA, and never reads the host
        if isinstance(part, MLALayerSpec):
            sizes = (part.kv_lora_rank, part.qk_rope_head_dim, part.qk_nope_head_dim, part.v_head_dim)
            trials.append(
                MLAProbe(device, dtype, part.num_heads, sizes, part.is_interleaved, capture=capture, kv_dtype=kv_dtype)
            )
        else:
            shape = (part.num_heads, part.num_kv_heads, part.head_dim, part.softcap)
            kinds = {
                "has_windows": windowed,
                "has_sinks": has_sinks(spec),
                "has_chunked_windows": has_chunked_attention(spec),
                "only_prefill_graph": prompts,
            }
            attention_probes.append(
                PagedAttentionProbe(device, dtype, *shape, **kinds, capture=capture, kv_dtype=kv_dtype)
            )
    if attention_probes:
        trials.append(partial(try_attention, attention_probes, child_trials))
    if ranks > 1 and kv_dtype not in QUANTIZED_KV_DTYPES:
        trials += [partial(_run_trial_with_context_parallel, each, ranks) for each in trials]
    if not prompts:
        trials += [
            RecurrenceProbe(device, dtype, *each, capture=capture)
            for each in make_dummy_recurrence_params(spec, device)
        ]
    return partial(find_first_failure, trials)


def try_attention(
    probes: Sequence[PagedAttentionProbe], child_trials: ChildTrials | None, backend: Backend
) -> str | None:
    if child_trials is not None and isinstance(backend, FlashPagedBackend):
        return child_trials.find_failure(backend, probes)
    return find_first_failure(probes, backend)


def _run_trial_with_context_parallel(trial: BackendTrial, ranks: int, backend: Backend) -> str | None:
    assert isinstance(backend, ReferenceBackend)
    return trial(SerialContextParallel(backend, ranks))
