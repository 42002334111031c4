"""`quire serve --models cache`: all downloaded models, loaded on demand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.config_reader import explain_unsupported_model
from quire.engine.checkpoint.model_catalog import load_catalog
from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.common.errors import ConfigError, ModelError
from quire.server.cli.models.downloaded import DownloadedModel, iterate_downloads, scan_hub_cache
from quire.server.cli.plan.machine import detect_machine
from quire.server.multi_model.models_config import ModelsConfig, ModelsFileOptions, parse_model_tables

log = logging.getLogger("quire.server.cli.models.cache")

CACHE_KEYWORD = Path("cache")
"""A file of this name takes precedence."""
_MEMORY_SHARE = 0.9


def build_cached_models_config(flags: Mapping[str, Any]) -> ModelsConfig:
    """Puts the smallest generative model first, because the first model is loaded at the start and is the default.
    Raises ConfigError if no model can be served.
    """
    cache = scan_hub_cache()
    downloads = (
        [] if cache is None else [each for each in iterate_downloads(cache) if each.has_weights and each.ref == "main"]
    )
    short_names = {entry.hub_name.display_name.lower(): entry.name for entry in load_catalog().values()}
    tables: dict[str, dict[str, Any]] = {}
    for each in sorted(downloads, key=lambda each: (not _is_generative(each), each.size_bytes, each.name)):
        if (why := _unserved_reason(each)) is not None:
            log.warning("models: %s is not served: %s", each.name, why)
            continue
        table: dict[str, Any] = {"model": each.name}
        if (name := short_names.get(each.name.lower())) is not None:
            table["served_model_name"] = [name]
        tables[each.name] = table
    if not tables:
        raise ConfigError("models: nothing is downloaded that could be served: quire pull MODEL downloads one")
    machine = detect_machine(gpu=flags.get("device") != "cpu")
    return parse_model_tables(
        "models: cache", tables, ModelsFileOptions(memory=_MEMORY_SHARE * machine.memory / 2**30), flags
    )


def _is_generative(model: DownloadedModel) -> bool:
    name = model.name.lower()
    return not any(part in name for part in ("embed", "rerank", "bge", "gte", "e5-", "minilm", "clip"))


def _unserved_reason(model: DownloadedModel) -> str | None:
    try:
        raw, _ = read_raw_config(str(model.path))
    except ModelError as error:
        return error.message
    reasons = explain_unsupported_model(raw)
    return reasons[0] if reasons else None
