"""The names by which one model may be known."""

from __future__ import annotations

from quire.engine.checkpoint.catalog import known_models
from quire.engine.checkpoint.names import hub_name
from quire.server.config import ServerConfig


def equivalent_names(model: str) -> list[str]:
    """What a model may be called where it is served: as somebody wrote it, its short name, and the hub's."""
    names = [model, ServerConfig(model=model).model_names[0]]
    known = known_models()
    if (entry := known.get(model.lower())) is not None:
        names.append(entry.hub.shown)
    if ":" not in model and f"{model}:latest" in known:
        names.append(f"{model}:latest")
    hub = hub_name(model)
    names += [entry.name for entry in known.values() if hub is not None and entry.hub.shown == hub.shown]
    return list(dict.fromkeys(names))
