"""Short names of models, such as qwen3:4b: where each is on the hub, and its shape, from catalog.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.names import HubName
from quire.engine.unsupported_options import suggest_nearest

_TELLING = 3
"""Letters that may tell which family is meant."""
_TABLE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    use: str
    """chat, code, embed or rerank."""
    hub: HubName
    licence: str
    gigabytes: float | None
    """10^9 bytes of the GGUF file; None for safetensors."""
    config: Mapping[str, Any]
    """What of config.json says the model's shape."""


def nearest_models(name: str, known: Collection[str]) -> str:
    """What to write instead of a short name that is none; "" where none is near."""
    low = name.lower()
    sized = [each for each in known if each.startswith(f"{low}:")]
    if sized:
        return f"write it with a size: {' or '.join(sized)}"
    longer = [each for each in known if each.startswith(low)] if len(low) >= _TELLING else []
    family = [each for each in known if each.partition(":")[0] == low.partition(":")[0]]
    alike = longer or ([] if suggest_nearest(low, known) else family)
    return f"did you mean {' or '.join(alike)}?" if alike else suggest_nearest(low, known)


def known_models() -> dict[str, CatalogEntry]:
    """By short name, in the table's order."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {
        name: CatalogEntry(
            name,
            entry["use"],
            HubName(entry["repo"], entry.get("tag")),
            entry["licence"],
            entry.get("gigabytes"),
            entry["config"],
        )
        for name, entry in table.items()
    }
