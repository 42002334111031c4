from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import torch

from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend
from quire.kernels.probes.backend_probe import GraphCapture, PagedAttentionProbe

READY = b"ready\n"
"""The child writes this once it can use the GPU. The verdict follows."""


class ProbeSettings(msgspec.Struct, frozen=True):
    values: dict[str, str | int | float | bool | None]
    """The probe's fields, with devices and dtypes by name."""
    uses_graph: bool

    @classmethod
    def from_probe(cls, probe: PagedAttentionProbe) -> ProbeSettings:
        values = {each.name: getattr(probe, each.name) for each in fields(probe) if each.name != "capture"}
        values["device"] = str(probe.device)
        for name in ("dtype", "kv_dtype"):
            values[name] = None if values[name] is None else str(values[name]).removeprefix("torch.")
        return cls(values, probe.capture is not None)

    def make_probe(self, capture: GraphCapture | None) -> PagedAttentionProbe:
        values: dict[str, Any] = dict(self.values)
        values["device"] = torch.device(values["device"])
        for name in ("dtype", "kv_dtype"):
            values[name] = None if values[name] is None else getattr(torch, values[name])
        return PagedAttentionProbe(**values, capture=capture)


class TrialRequest(msgspec.Struct, frozen=True):
    backend: str
    deterministic: bool
    probes: list[ProbeSettings]

    @classmethod
    def from_probes(cls, backend: FlashPagedBackend, probes: Sequence[PagedAttentionProbe]) -> TrialRequest:
        return cls(backend.name, backend.deterministic, [ProbeSettings.from_probe(each) for each in probes])


class TrialVerdict(msgspec.Struct, frozen=True):
    failure: str | None
    """Why the backend cannot serve; None if all probes passed."""
    seconds: float
