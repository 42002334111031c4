from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from fastapi import APIRouter, FastAPI

from quire.server.observe.http_metrics import HttpMetrics
from quire.server.routes import endpoints, engine_admin, models, requests, responses, sessions, status, web_pages
from quire.server.routes.api_description import describe_bodies
from quire.server.routes.data_dir import batches, conversations, files, streams
from quire.server.routes.ollama import model_info, pull
from quire.server.routes.websocket import responses_socket

ROUTERS = (
    endpoints.router,
    responses.generation_router,
    responses.counting_router,
    responses.router,
    responses_socket.router,
    conversations.router,
    model_info.router,
    pull.router,
    batches.router,
    files.router,
    streams.router,
    models.router,
    models.rate_limited_router,
    sessions.router,
    requests.router,
    engine_admin.router,
    engine_admin.sleep_router,
    status.router,
    web_pages.router,
)


def add_routers_with_metrics(app: FastAPI, first_routers: Sequence[APIRouter]) -> HttpMetrics:
    """`first_routers` take precedence over all other routes."""
    routers = [*first_routers, *ROUTERS]
    for router in routers:
        app.include_router(router)
    describe_bodies(app, ROUTERS)
    routes_of_routers = chain.from_iterable(router.routes for router in routers)
    return HttpMetrics([*routes_of_routers, *app.routes])
