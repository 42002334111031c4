from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.common.errors import ConfigError, InvalidRequest, Overloaded
from quire.engine.common.folder_reader import describe_validation_error
from quire.server.access.body_reader import READ_BODY_SCOPE_KEY, BodyBuffer
from quire.server.access.tenants import Tenants
from quire.server.app_builder import build_app
from quire.server.config import ServerConfig
from quire.server.error_responses import OLLAMA_PREFIX, SYSTEM_ONE_PATH
from quire.server.http.sse import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from quire.server.multi_model.added_models import AddedModels
from quire.server.multi_model.model_manager import ManagedModel, ModelManager
from quire.server.multi_model.models_config import ModelsConfig
from quire.server.multi_model.presets import apply_preset
from quire.server.protocol.questions.systemone import is_model_alias
from quire.server.resolve.other_apis.ollama import strip_latest_tag
from quire.server.routes.models import list_model_cards, model_list_body
from quire.server.routes.ollama.model_info import model_entry, ps_entries, tags_entries
from quire.server.routes.status import health_response
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import ModelDispatcher, get_server_context

router = APIRouter(include_in_schema=False)


class _ModelNameBody(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """Ollama's older clients use it."""


class _ModelChangeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""


class _LoadBody(_ModelChangeBody):
    settings: dict[str, Any] | None = None


class _UnloadBody(_ModelChangeBody):
    forget: bool = False
    """If True, a model that was added at run time is also forgotten."""


Change = TypeVar("Change", bound=_ModelChangeBody)


def create_multi_model_app(
    manager: ModelManager,
    models_config: ModelsConfig,
    added_models: AddedModels,
    config: ServerConfig,
    tenants: Tenants,
) -> FastAPI:
    """The lifespan runs the manager. Raises the errors of `build_app`."""

    @asynccontextmanager
    async def open_models() -> AsyncIterator[ModelDispatcher]:
        try:
            await manager.start()
            yield MultiModelDispatcher(manager, models_config, added_models)
        finally:
            await manager.stop()

    return build_app(config, tenants, open_models, [router])


class MultiModelDispatcher:
    def __init__(self, manager: ModelManager, models_config: ModelsConfig, added_models: AddedModels) -> None:
        self.manager = manager
        self.models_config = models_config
        self.added_models = added_models

    @property
    def loaded_runtimes(self) -> list[ModelRuntime]:
        return self.manager.loaded_runtimes

    async def dispatch_request(
        self, handler: ASGIApp, scope: Scope, receive: Receive, send: Send, *, needs_awake: bool, names_model: bool
    ) -> None:
        """The body counts in the memory budget until the handler takes it over."""
        request, path = Request(scope, receive), scope["path"]
        name = request.query_params.get("model") or request.path_params.get("model")
        if request.method not in ("POST", "PUT", "PATCH"):
            if names_model:
                scope["runtime"] = await self.wait_until_loaded(self._find_model(path, name), receive)
            return await handler(scope, receive, send)
        try:
            async with get_server_context(request).body_reader.hold_request_body(request) as body:
                scope[READ_BODY_SCOPE_KEY] = body
                name = name if (body_name := _requested_model_name(path, b"".join(body.chunks))) is None else body_name
                self._apply_preset(path, name, body)
                member = self._find_model(path, name) if names_model else self._loaded_or_first_model()
                with self.manager.keep_awake(member) if needs_awake else nullcontext():
                    scope["runtime"] = await self.wait_until_loaded(member, receive)
                    await handler(scope, receive, send)
        except ClientDisconnect:
            raise HTTPException(CLIENT_CLOSED_REQUEST) from None

    def _apply_preset(self, path: str, name: str | None, body: BodyBuffer) -> None:
        if name is None:
            name = self.manager.managed_models[0].entry.name
        elif path.startswith(OLLAMA_PREFIX):
            name = strip_latest_tag(name, self.models_config.presets)
        if (preset := self.models_config.presets.get(name)) is not None:
            apply_preset(preset, path, body)

    def _loaded_or_first_model(self) -> ManagedModel:
        return next(
            (member for member in self.manager.managed_models if member.runtime is not None),
            self.manager.managed_models[0],
        )

    def _find_model(self, path: str, name: str | None) -> ManagedModel:
        members = self.manager.managed_models
        names = [each for member in members for each in member.served_names]
        if not name or (path == SYSTEM_ONE_PATH and is_model_alias(name, names)):
            return members[0]
        return self.manager.require_model(strip_latest_tag(name, names) if path.startswith(OLLAMA_PREFIX) else name)

    async def wait_until_loaded(self, member: ManagedModel, receive: Receive) -> ModelRuntime:
        """Raises the load's error, or HTTPException if the client disconnects."""
        if member.runtime is not None:
            return member.runtime
        with self.manager.keep_awake(member):
            return await cancel_on_disconnect(receive, self.manager.wait_until_loaded(member))


@router.api_route("/health", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/live", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ping", methods=["GET", "HEAD"], response_model=None)
async def health(request: Request) -> Response:
    """200 while models can be loaded and woken, otherwise 503."""
    return health_response(request, is_healthy=_get_dispatcher(request).manager.is_alive)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    listed_cards: list[dict[str, Any]] = []
    for member in _get_dispatcher(request).manager.managed_models:
        if member.runtime is not None:
            cards_of_model = list_model_cards(member.runtime.model)
        else:
            cards_of_model = [{"id": name, "object": "model", "owned_by": "quire"} for name in member.served_names]
        listed_cards += [card | {"state": member.state} for card in cards_of_model]
    return model_list_body(listed_cards)


@router.get("/api/tags")
async def list_model_tags(request: Request) -> dict[str, Any]:
    """All models, for Ollama's clients."""
    entries: list[dict[str, Any]] = []
    for member in _get_dispatcher(request).manager.managed_models:
        entries += (
            [model_entry(name) for name in member.served_names]
            if member.runtime is None
            else tags_entries(member.runtime)
        )
    return {"models": entries}


@router.get("/api/ps")
async def list_running_models(request: Request) -> dict[str, Any]:
    """Awake models."""
    awake = [member.runtime for member in _get_dispatcher(request).manager.managed_models if member.state == "awake"]
    return {"models": [each for runtime in awake if runtime is not None for each in ps_entries(runtime)]}


@router.post("/v1/models/load")
async def load_model(request: Request) -> dict[str, str]:
    """Load a model. A new one is kept only if it can be loaded."""
    models, change = _get_dispatcher(request), await _decode_body(request, _LoadBody)
    if change.settings is None:
        await models.wait_until_loaded(member := models.manager.require_model(change.model), request.receive)
        return _state_body(member)
    try:
        entry = await asyncio.to_thread(models.models_config.parse_added_entry, change.model, change.settings)
    except ConfigError as error:
        raise InvalidRequest(error.message, param=error.param) from None
    member = models.manager.add_model(entry)
    try:
        await models.wait_until_loaded(member, request.receive)
    except BaseException as error:
        await models.manager.remove_model(member)
        if isinstance(error, Overloaded):
            raise InvalidRequest(f"settings: {error.message}", param="settings") from None
        raise
    models.added_models.add_model(change.model, change.settings)
    return _state_body(member)


@router.post("/v1/models/unload")
async def unload_model(request: Request) -> dict[str, str]:
    models, change = _get_dispatcher(request), await _decode_body(request, _UnloadBody)
    member = models.manager.require_model(change.model)
    if not change.forget:
        await models.manager.abort_requests_and_unload(member)
        return _state_body(member)
    if member.entry.name not in models.added_models:
        raise InvalidRequest("forget: the model is in the file of --models", param="forget")
    models.added_models.forget_model(member.entry.name)
    await models.manager.remove_model(member)
    return _state_body(member)


def _get_dispatcher(request: Request) -> MultiModelDispatcher:
    models = request.app.state.server.models
    assert isinstance(models, MultiModelDispatcher)
    return models


def _state_body(member: ManagedModel) -> dict[str, str]:
    return {"model": member.entry.name, "state": member.state}


async def _decode_body(request: Request, kind: type[Change]) -> Change:
    try:
        async with get_server_context(request).body_reader.hold_request_body(request) as body:
            change = msgspec.json.decode(b"".join(body.chunks), type=kind)
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        message = (
            describe_validation_error(error) if isinstance(error, msgspec.ValidationError) else "the body is not JSON"
        )
        raise InvalidRequest(message, param=message.partition(":")[0] if ":" in message else None) from None
    if not change.model:
        raise InvalidRequest("model is required", param="model")
    return change


def _requested_model_name(path: str, body: bytes) -> str | None:
    try:
        names = msgspec.json.decode(body, type=_ModelNameBody)
        return names.model or names.name if path.startswith(OLLAMA_PREFIX) else names.model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # the route reports this error
