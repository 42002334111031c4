"""Every linear of a layer receives the adapter slots of its rows, in the last layer too; on CPUs layers stay fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_memory import allocate_kv_blocks, kv_cache_by_layer, prefill_metadata
from quire.engine.worker.loading.weight_loader import dummy_stream, load_weights
from quire.kernels.backend import AttentionMetadata, Linear, LinearContext
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
TOKENS = 6
KEPT = torch.tensor([2, 5])
LINEARS = ("qkv", "out", "gate_up", "down")


class RecordingBackend(ReferenceBackend):
    """Records the context that each linear receives, in call order."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[tuple[int, LinearContext]] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        inner = super().pack_linear(weight, bias, wide=wide)

        def linear(x: Tensor, context: LinearContext) -> Tensor:
            self.contexts.append((len(x), context))
            return inner(x, context)

        return linear


def run(backend: ReferenceBackend, path: Path, adapters: Tensor | None) -> Tensor:
    spec = decoder_spec(read_model_config(path))
    scheme = UnquantizedScheme(backend, torch.float32)
    model = Decoder(
        spec,
        BuildContext(backend, scheme, spec.hidden_size, torch.float32, torch.float32, CPU, max_model_len=64),
        lambda: None,
    )
    table = model.parameters()
    load_weights(table, dummy_stream(table, 1, CPU), device=CPU)
    plain = prefill_metadata(1, TOKENS, backend.block_size, CPU)
    fields = {name: getattr(plain, name) for name in AttentionMetadata.__slots__}
    metadata = AttentionMetadata(**fields | {"linear_context": LinearContext(adapters)})
    return model.forward(torch.arange(TOKENS), metadata, kv_cache_by_layer(model, allocate_kv_blocks(model, 4)), KEPT)


def test_linears_receive_adapter_slots_of_their_rows(tmp_path: Path) -> None:
    adapters, backend = torch.arange(TOKENS) * 10, RecordingBackend()
    run(backend, save_tiny_model(tmp_path, "llama", num_hidden_layers=2), adapters)
    all_slots, kept_slots = adapters.tolist(), adapters[KEPT].tolist()
    actual = [
        (rows, context.adapter_slots.tolist())
        for rows, context in backend.contexts
        if context.adapter_slots is not None
    ]
    assert actual == [(TOKENS, all_slots)] * (len(LINEARS) + 1) + [(len(KEPT), kept_slots)] * (len(LINEARS) - 1)


def test_layers_are_fused_with_adapter_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    if backend.missing_reason:
        pytest.skip(backend.missing_reason)
    if not backend.prefers_native_linear(torch.float32):
        pytest.skip("float32 is oneDNN's on this machine: no layers are fused")
    path, calls = save_tiny_model(tmp_path, "llama"), []
    recorded = backend.record_layers

    def record_and_count(*arguments: object, **options: object) -> object:
        together = recorded(*arguments, **options)
        return lambda *step: calls.append(len(step)) or together(*step)

    monkeypatch.setattr(backend, "record_layers", record_and_count)
    fused = run(backend, path, None)
    assert calls
    calls.clear()
    assert torch.equal(run(backend, path, torch.zeros(TOKENS, dtype=torch.int64)), fused)
    assert calls
