"""What `quire serve --models FILE` serves: several models, of which the first is there from the start."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from quire.engine import VERSION
from quire.engine.replicas.replicas import processes
from quire.server.access.tenants import Tenants
from quire.server.cli.announcement import curl
from quire.server.cli.models.cache import CACHE, cached_fleet
from quire.server.config import ServerConfig
from quire.server.fleet.added_models import AddedModels
from quire.server.fleet.app import fleet_app
from quire.server.fleet.config import ModelEntry, read_fleet
from quire.server.fleet.fleet import Fleet
from quire.server.runtime import Runtime, serving


class SeveralModels:
    """The same for `Service` as serve.OneModel. `file`: a TOML file, or `cache` for all that is downloaded. Raises
    ConfigError for what is wrong in the file."""

    def __init__(self, config: ServerConfig, file: Path) -> None:
        self._config = config
        flags = config.model_dump(exclude_unset=True)
        self._models = cached_fleet(flags) if file == CACHE and not file.exists() else read_fleet(file, flags)
        self._fleet: Fleet | None = None

    @property
    def alive(self) -> bool:
        return self._fleet is not None and self._fleet.alive

    @property
    def num_open(self) -> int:
        return 0 if self._fleet is None else self._fleet.num_open

    def launch(self) -> None:
        """Nothing can be done before the event loop and the imports are there."""

    @asynccontextmanager
    async def running(self, hosting: Any) -> AsyncIterator[FastAPI]:
        hosting.tls_context(self._config)  # before a model is loaded
        tenants, data = Tenants(self._config), self._config.data_dir

        @asynccontextmanager
        async def opened(entry: ModelEntry) -> AsyncIterator[Runtime]:
            client, folder = processes(entry.config), data and data / entry.name.replace("/", "--")
            try:
                client.link.launch()
                source, modules = await asyncio.to_thread(hosting.read_files, entry.config)
                async with serving(source, modules, client, keyed=tenants.closed, folder=folder) as runtime:
                    yield runtime
            finally:
                await client.link.stop()

        added = AddedModels(self._models, data)
        self._fleet = Fleet(self._models, opened)
        for entry in await asyncio.to_thread(added.start):
            self._fleet.add(entry)
        app = fleet_app(self._fleet, self._models, added, self._config, tenants)
        async with app.router.lifespan_context(app):
            yield app

    async def stop(self) -> None:
        if self._fleet is not None:
            await self._fleet.stop()

    def announcement(self, base: str, seconds: float, tls: ssl.SSLContext | None) -> str:
        assert self._fleet is not None
        first = self._fleet.members[0]
        width = max(len(member.entry.name) for member in self._fleet.members)
        models = "".join(
            f"\n  {'models' if member is first else '':10} {member.entry.name:{width}}  {member.state}"
            for member in self._fleet.members
        )
        memory = self._models.memory
        bound = "" if memory is None else f"\n  memory     {memory / 2**30:.4g} GiB for those that are awake"
        assert first.runtime is not None
        chats = first.runtime.model.renderer.has_template
        return f"""\
quire {VERSION}{models}{bound}
  ready      {base} after {seconds:.1f} s; Ctrl-C ends it

{curl(first.entry.config, first.runtime.info, base, tls, chats=chats)}
"""
