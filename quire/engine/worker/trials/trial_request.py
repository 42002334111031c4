from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import torch

from quire.kernels.backend import Backend
from quire.kernels.probes.backend_probe import GraphCapture, PagedAttentionProbe
from quire.kernels.probes.chunked_recurrence_probe import ChunkedRecurrenceProbe
from quire.kernels.reference import ReferenceBackend

READY = b"ready\n"
"""The child writes this once it can use the GPU. The verdict follows."""

ChildProbe = PagedAttentionProbe | ChunkedRecurrenceProbe
_PROBE_CLASSES: dict[str, type[ChildProbe]] = {
    "attention": PagedAttentionProbe,
    "chunked recurrence": ChunkedRecurrenceProbe,
}


class ProbeSettings(msgspec.Struct, frozen=True):
    values: dict[str, str | int | float | bool | None]
    """The probe's fields, with devices and dtypes by name."""
    uses_graph: bool
    subject: str = "attention"

    @classmethod
    def from_probe(cls, probe: ChildProbe) -> ProbeSettings:
        values = {each.name: getattr(probe, each.name) for each in fields(probe) if each.name != "capture"}
        values["device"] = str(probe.device)
        for name in ("dtype", "kv_dtype"):
            values[name] = None if values[name] is None else str(values[name]).removeprefix("torch.")
        subject = next(name for name, each in _PROBE_CLASSES.items() if isinstance(probe, each))
        return cls(values, probe.capture is not None, subject)

    def make_probe(self, capture: GraphCapture | None) -> ChildProbe:
        values: dict[str, Any] = dict(self.values)
        values["device"] = torch.device(values["device"])
        for name in ("dtype", "kv_dtype"):
            values[name] = None if values[name] is None else getattr(torch, values[name])
        return _PROBE_CLASSES[self.subject](**values, capture=capture)


class TrialRequest(msgspec.Struct, frozen=True):
    backend: str
    deterministic: bool
    probes: list[ProbeSettings]

    @classmethod
    def from_probes(cls, backend: Backend, probes: Sequence[ChildProbe]) -> TrialRequest:
        assert isinstance(backend, ReferenceBackend)
        return cls(backend.name, backend.deterministic, [ProbeSettings.from_probe(each) for each in probes])


class TrialVerdict(msgspec.Struct, frozen=True):
    failure: str | None
    """None if all probes passed."""
    seconds: float
