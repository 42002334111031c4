"""The trial of chunked recurrences on GPUs where they were never run."""

from __future__ import annotations

import torch

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.models.requirements import make_dummy_recurrence_params
from quire.engine.worker.trials.child_trials import ChildTrials
from quire.kernels.backend import Backend
from quire.kernels.probes.chunked_recurrence_probe import ChunkedRecurrenceProbe


def enable_chunks_after_trial(
    backend: Backend, device: torch.device, dtype: torch.dtype, spec: DecoderSpec, child_trials: ChildTrials | None
) -> str | None:
    """Returns None if the trial passed, or if there is nothing to try: on Hopper, with --deterministic, for rules
    without chunks and on GPUs that cannot run them.
    """
    owner = backend.chunked_recurrence_backend()
    if child_trials is None or owner is None or not spec.needs_state_snapshots:
        return None
    from quire.kernels.gpu.recurrent.chunked_recurrence import has_chunked_kernel, needs_chunk_trial

    probes = [
        ChunkedRecurrenceProbe.from_rule(device, dtype, rule, value_dim)
        for rule, value_dim in make_dummy_recurrence_params(spec, torch.device("cpu"))
        if has_chunked_kernel(rule, dtype, hopper=False)
    ]
    if not probes or not needs_chunk_trial(device.index):
        return None
    failure = child_trials.find_failure(owner, probes)
    owner.passed_chunk_trial = failure is None
    return failure
