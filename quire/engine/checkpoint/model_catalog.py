"""Short names such as qwen3:4b, from catalog.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.hub_names import HubName
from quire.engine.unsupported_options import suggest_nearest

_MIN_PREFIX_LETTERS = 3
_CATALOG_FILE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    use_case: str
    hub_name: HubName
    licence: str
    gigabytes: float | None
    """Size of the GGUF file in 10^9 bytes; None for safetensors."""
    config: Mapping[str, Any]


def suggest_short_name(name: str, short_names: Collection[str]) -> str:
    lowercase_name = name.lower()
    names_with_size = [each for each in short_names if each.startswith(f"{lowercase_name}:")]
    if names_with_size:
        return f"write it with a size: {' or '.join(names_with_size)}"
    prefix_matches = (
        [each for each in short_names if each.startswith(lowercase_name)]
        if len(lowercase_name) >= _MIN_PREFIX_LETTERS
        else []
    )
    same_family = [each for each in short_names if each.partition(":")[0] == lowercase_name.partition(":")[0]]
    suggestions = prefix_matches or ([] if suggest_nearest(lowercase_name, short_names) else same_family)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else suggest_nearest(lowercase_name, short_names)


def find_catalog_entry(name: str) -> CatalogEntry | None:
    """Ignores case."""
    return None if "/" in name else load_catalog().get(name.lower())


def load_catalog() -> dict[str, CatalogEntry]:
    table = tomllib.loads(_CATALOG_FILE.read_text(encoding="utf-8"))
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
