"""The models that were added while the server ran. They are stored in its data folder, so that its next start has
them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.errors import ConfigError
from quire.server.adapters import keep
from quire.server.fleet.config import FleetConfig, ModelEntry

log = logging.getLogger("quire.server.fleet.added_models")

_FILE, _WHAT = "models.json", "the added models"


class AddedModels:
    """Settings by name. Without a data folder they end with the server."""

    def __init__(self, config: FleetConfig, data_dir: Path | None) -> None:
        self._file = None if data_dir is None else data_dir / _FILE
        self._settings: dict[str, Mapping[str, Any]] = {}
        self._config = config

    def start(self) -> list[ModelEntry]:
        """The models of before; what cannot be read or served any more is logged and left out."""
        entries = []
        for name, settings in self._kept().items():
            try:
                entries.append(self._config.entry(name, settings))
            except ConfigError as error:
                log.warning("the model %s, added before, is not served: %s", name, error.message)
            else:
                self._settings[name] = settings
        return entries

    def __contains__(self, name: str) -> bool:
        return name in self._settings

    def add(self, name: str, settings: Mapping[str, Any]) -> None:
        self._settings[name] = settings
        keep(self._file, self._settings, _WHAT)

    def forget(self, name: str) -> None:
        del self._settings[name]
        keep(self._file, self._settings, _WHAT)

    def _kept(self) -> dict[str, Any]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            kept = json.loads(self._file.read_bytes())
            if not all(isinstance(each, dict) for each in kept.values()):
                raise ValueError("not an object of objects")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            log.error("the models added before cannot be read from %s: %s", self._file, error)
            return {}
        return dict(kept)
