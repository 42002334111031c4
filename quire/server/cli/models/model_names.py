from __future__ import annotations

from quire.engine.checkpoint.hub_names import parse_hub_name
from quire.engine.checkpoint.model_catalog import load_catalog
from quire.server.config import ServerConfig


def equivalent_names(model: str) -> list[str]:
    names = [model, ServerConfig(model=model).model_names[0]]
    known = load_catalog()
    if (entry := known.get(model.lower())) is not None:
        names.append(entry.hub_name.display_name)
    if ":" not in model and f"{model}:latest" in known:
        names.append(f"{model}:latest")
    hub = parse_hub_name(model)
    names += [
        entry.name for entry in known.values() if hub is not None and entry.hub_name.display_name == hub.display_name
    ]
    return list(dict.fromkeys(names))
