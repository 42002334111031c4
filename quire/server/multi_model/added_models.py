from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ConfigError
from quire.server.adapter_registry import write_json_file
from quire.server.multi_model.models_config import ModelEntry, ModelsConfig

log = logging.getLogger("quire.server.multi_model.added_models")

_FILE_NAME, _DESCRIPTION = "models.json", "the added models"


class AddedModels:
    """Without a data directory, added models are lost when the server ends."""

    def __init__(self, config: ModelsConfig, data_dir: Path | None) -> None:
        self._file = None if data_dir is None else data_dir / _FILE_NAME
        self._settings: dict[str, Mapping[str, Any]] = {}
        self._config = config

    def load_entries(self) -> list[ModelEntry]:
        entries = []
        for name, settings in self._read_settings().items():
            try:
                entries.append(self._config.parse_added_entry(name, settings))
            except ConfigError as error:
                log.warning("the model %s, added earlier, is not served: %s", name, error.message)
            else:
                self._settings[name] = settings
        return entries

    def __contains__(self, name: str) -> bool:
        return name in self._settings

    def add_model(self, name: str, settings: Mapping[str, Any]) -> None:
        self._settings[name] = settings
        write_json_file(self._file, self._settings, _DESCRIPTION)

    def forget_model(self, name: str) -> None:
        del self._settings[name]
        write_json_file(self._file, self._settings, _DESCRIPTION)

    def _read_settings(self) -> dict[str, Any]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            settings_by_name = json.loads(self._file.read_bytes())
            if not all(isinstance(each, dict) for each in settings_by_name.values()):
                raise ValueError("not an object of objects")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            log.error("the models added earlier cannot be read from %s: %s", self._file, error)
            return {}
        return dict(settings_by_name)
