"""The one place that chooses how a spec is generated."""

from __future__ import annotations

from quire.engine.link.client import EngineClient
from quire.server.generation.beam_search import BeamSearch
from quire.server.generation.generation import Generation
from quire.server.generation.loop_turns import LoopTurns
from quire.server.generation.sampling import Sampling
from quire.server.generation.spec import GenerationSpec
from quire.server.observe.metrics import Metrics
from quire.server.served_model import ServedModel


def start(
    spec: GenerationSpec, model: ServedModel, client: EngineClient, metrics: Metrics, turns: LoopTurns
) -> Generation:
    """Raises EngineError when the engine is gone."""
    if spec.beam_search:
        return BeamSearch(spec, model.tokenizer, client, metrics, turns, context_length=model.context_length)
    return Sampling(spec, model.tokenizer, client, metrics, turns)
