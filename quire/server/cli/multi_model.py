"""`quire serve --models FILE`: several models, the first loaded at the start."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from quire.engine import VERSION
from quire.engine.client.replicated_client import processes
from quire.server.access.tenants import Tenants
from quire.server.cli.announcement import curl_command, display_address
from quire.server.cli.models.cached_models import CACHE_KEYWORD, build_cached_models_config
from quire.server.config import ServerConfig
from quire.server.multi_model.added_models import AddedModels
from quire.server.multi_model.model_manager import ModelManager
from quire.server.multi_model.models_config import ModelEntry, read_models_file
from quire.server.multi_model.multi_model_app import create_multi_model_app
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.model_startup import open_runtime


class MultiModelHost:
    """`file` is a models file in TOML, or `cache` for all downloaded models. The constructor raises ConfigError."""

    def __init__(self, config: ServerConfig, file: Path) -> None:
        self._config = config
        flags = config.model_dump(exclude_unset=True)
        self._models_config = (
            build_cached_models_config(flags)
            if file == CACHE_KEYWORD and not file.exists()
            else read_models_file(file, flags)
        )
        self._manager: ModelManager | None = None

    @property
    def alive(self) -> bool:
        return self._manager is not None and self._manager.is_alive

    @property
    def num_open(self) -> int:
        return 0 if self._manager is None else self._manager.num_open_requests

    def launch_engine(self) -> None:
        """Does nothing, because loading needs the event loop."""

    @asynccontextmanager
    async def open_app(self) -> AsyncIterator[FastAPI]:
        from quire.server.http.server import tls_context
        from quire.server.runtime.model_spec_loader import load_served_model_spec

        tls_context(self._config)
        tenants, data = Tenants(self._config), self._config.data_dir

        @asynccontextmanager
        async def open_model(entry: ModelEntry) -> AsyncIterator[ModelRuntime]:
            client, folder = processes(entry.config), data and data / entry.name.replace("/", "--")
            try:
                client.engine_core.launch()
                source, modules = await asyncio.to_thread(load_served_model_spec, entry.config)
                async with open_runtime(
                    source, modules, client, has_api_keys=tenants.requires_key, folder=folder
                ) as runtime:
                    yield runtime
            finally:
                await client.engine_core.stop()

        added_models = AddedModels(self._models_config, data)
        self._manager = ModelManager(self._models_config, open_model)
        for entry in await asyncio.to_thread(added_models.load_entries):
            self._manager.add_model(entry)
        app = create_multi_model_app(self._manager, self._models_config, added_models, self._config, tenants)
        async with app.router.lifespan_context(app):
            yield app

    async def stop(self) -> None:
        if self._manager is not None:
            await self._manager.stop()

    def announcement_text(self, base: str, seconds: float, tls: ssl.SSLContext | None) -> str:
        assert self._manager is not None
        first = self._manager.managed_models[0]
        width = max(len(member.entry.name) for member in self._manager.managed_models)
        models = "".join(
            f"\n  {'models' if member is first else '':10} {member.entry.name:{width}}  {member.state}"
            for member in self._manager.managed_models
        )
        memory = self._models_config.memory_limit_bytes
        bound = "" if memory is None else f"\n  memory     {memory / 2**30:.4g} GiB for the models that are awake"
        assert first.runtime is not None
        chats = first.runtime.model.chat_formats.renderer.has_template
        return f"""\
quire {VERSION}{models}{bound}
  ready      {display_address(self._config, base)} after {seconds:.1f} s; Ctrl-C ends it

{curl_command(first.entry.config, first.runtime.info, base, tls, has_chat_template=chats)}
"""
