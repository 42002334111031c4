"""What a backend must show on a GPU before it is chosen, and before graphs hold its steps."""

from __future__ import annotations

from functools import partial

import torch

from quire.engine.config import EngineConfig
from quire.engine.layers.latent_attention import LatentAttentionSpec
from quire.engine.models.asked import each_attention, has_chunks, has_sinks, sample_rules
from quire.engine.models.spec import DecoderSpec
from quire.engine.worker.graphs.capture import CudaCapture
from quire.kernels.attention.in_turn import InTurn
from quire.kernels.backend import Backend
from quire.kernels.gpu.others import is_other
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.latents.probe import LatentProbe
from quire.kernels.probe import Capture, Probe
from quire.kernels.recurrent.probe import RuleProbe
from quire.kernels.reference import Reference
from quire.kernels.select import Trial


def choose_trials(
    config: EngineConfig, device: torch.device, types: tuple[torch.dtype, torch.dtype], spec: DecoderSpec
) -> list[Trial]:
    """What a backend must compute on a GPU before it is chosen: with its decodes in a CUDA graph, if need be without.
    On a CPU nothing: its kernels were built on this machine, for an instruction set that it says it has."""
    if device.type == "cpu":
        return []
    captures: list[Capture | None] = [None] if config.enforce_eager or is_other(device) else [CudaCapture(device), None]
    ranks = config.decode_context_parallel_size
    first, *others = (_trial(types, device, spec, capture, ranks=ranks) for capture in captures)
    return [first, *(partial(_without_graphs, trial) for trial in others)]


def _without_graphs(trial: Trial, backend: Backend) -> str | None:
    """Of one that a graph does not hold, or computes something else in one."""
    if (why := trial(backend)) is None:
        backend.in_graphs = "nothing"
    return why


def why_eager_prompts(
    config: EngineConfig,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    spec: DecoderSpec,
    backend: Backend,
) -> str | None:
    """Why graphs that hold decodes hold no step with prompts: what the backend says of itself, or what a library's
    attention shows. Of several ranks the first one's answer is that of all. types: computed, and held by pages."""
    if backend.in_graphs != "steps":
        return f"{backend.name} computes prompts with looks at the host"
    if config.enforce_eager or not choose_trials(config, device, types, spec):
        return None
    ranks = config.decode_context_parallel_size
    return _trial(types, device, spec, CudaCapture(device), ranks=ranks, prompts=True)(backend)


def _trial(
    types: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    spec: DecoderSpec,
    capture: Capture | None,
    *,
    ranks: int = 1,
    prompts: bool = False,
) -> Trial:
    """Of attention in each of its shapes, over latents where the model has some, and of each rule by which layers
    change states; of attention also as so many `ranks` that divide tokens compute it. prompts: whether graphs hold
    parts of prompts, where a library may compute these."""
    (dtype, held), windowed, tried = types, any(each.window for each in spec.states), list[Trial]()
    for part in each_attention(spec):
        if isinstance(part, LatentAttentionSpec) and prompts:
            continue  # Triton's, as rules are: nothing of ours looks at the host
        if isinstance(part, LatentAttentionSpec):
            sizes = (part.latent, part.rotated, part.plain, part.value)
            tried.append(
                LatentProbe(device, dtype, part.num_heads, sizes, part.neighbours, capture=capture, kv_dtype=held)
            )
        else:
            shape = (part.num_heads, part.num_kv_heads, part.head_dim, part.softcap)
            kinds = {"windowed": windowed, "sinks": has_sinks(spec), "chunked": has_chunks(spec), "prompts": prompts}
            tried.append(Probe(device, dtype, *shape, **kinds, capture=capture, kv_dtype=held))
    if ranks > 1 and held not in KV_CODES:
        tried += [partial(_in_turn, each, ranks) for each in tried]
    if not prompts:
        tried += [RuleProbe(device, dtype, *each, capture=capture) for each in sample_rules(spec, device)]
    return lambda backend: next((why for each in tried if (why := each(backend)) is not None), None)


def _in_turn(trial: Trial, ranks: int, backend: Backend) -> str | None:
    assert isinstance(backend, Reference)
    return trial(InTurn(backend, ranks))
