from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.shared_client import SharedClient
from quire.engine.lora.target_modules import ModuleShapes
from quire.engine.processes.child import Child
from quire.server.access.memory_lease import MAX_LEASED_BYTES, MAX_LEASED_IMAGE_BYTES
from quire.server.access.tenants import Tenants
from quire.server.app_builder import build_app
from quire.server.durability.peers import PeerLink
from quire.server.runtime.model_startup import open_runtime
from quire.server.runtime.server_context import ModelDispatcher, SingleModelDispatcher
from quire.server.served_model import ServedModelSpec
from quire.server.workers.pool import LaunchProcess


def create_app(
    client: EngineClient,
    source: ServedModelSpec,
    modules: ModuleShapes | None = None,
    link: PeerLink | None = None,
    launch_process: LaunchProcess = Child,
) -> FastAPI:
    """The app's lifespan starts and stops the client, and raises the errors of `open_runtime`. This function raises the
    errors of `build_app`.
    """
    config = source.config
    tenants = Tenants(config)

    @asynccontextmanager
    async def open_models() -> AsyncIterator[ModelDispatcher]:
        async with open_runtime(
            source,
            modules,
            client,
            has_api_keys=tenants.requires_key,
            folder=config.data_dir,
            launch_process=launch_process,
        ) as runtime:
            yield SingleModelDispatcher(runtime)

    budget_bytes = MAX_LEASED_BYTES
    if source.multimodal_prompt_builder is not None:
        budget_bytes += MAX_LEASED_IMAGE_BYTES
    data_link = client.engine_core if isinstance(client.engine_core, SharedClient) else link
    return build_app(config, tenants, open_models, budget_bytes=budget_bytes, link=data_link)
