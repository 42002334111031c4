"""Child process that runs the trial of a library's attention, or of chunked recurrences.

The first argument is the file descriptor for the answer: READY as soon as the GPU can be used, then a TrialVerdict.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec
import torch

from quire.engine.processes.child import end_with_parent, read_configuration
from quire.engine.worker.graphs.graph_capture import CudaGraphCapture
from quire.engine.worker.trials.trial_request import READY, TrialRequest, TrialVerdict
from quire.kernels.backend_selection import make_backend
from quire.kernels.device.error_messages import describe_kernel_error


def run_trial(request: TrialRequest) -> str | None:
    """Synchronizes the device at the end, because its errors may come late."""
    backend = make_backend(request.backend, deterministic=request.deterministic)
    for settings in request.probes:
        device = torch.device(str(settings.values["device"]))
        capture = CudaGraphCapture(device) if settings.uses_graph else None
        if (failure := settings.make_probe(capture)(backend)) is not None:
            return failure
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return None


def main() -> None:
    request = msgspec.json.decode(read_configuration(), type=TrialRequest)
    end_with_parent()
    answer = int(sys.argv[1])
    torch.zeros(1, device=str(request.probes[0].values["device"]))
    os.write(answer, READY)
    began = time.monotonic()
    try:
        failure = run_trial(request)
    except Exception as error:
        failure = describe_kernel_error(error)
    os.write(answer, msgspec.json.encode(TrialVerdict(failure, round(time.monotonic() - began, 3))))
    os._exit(0)  # a library's exit handlers may hang, too


if __name__ == "__main__":
    main()
