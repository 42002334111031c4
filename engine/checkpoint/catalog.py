"""Short names of models, such as qwen3:4b: where each is on the hub, and its shape, from catalog.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.names import HubName

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
