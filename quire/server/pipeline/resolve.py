"""Third station: resolves the body within limits of time and memory. A resolver (server/resolve) is a pure function
that first parses the body. Small bodies are resolved in the event loop. Others are resolved in a worker process,
because it can be killed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from quire.server.access.authentication import tenant_of
from quire.server.access.body_reader import BodyBuffer
from quire.server.access.memory_lease import grow_request_lease
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.vector_generation import VectorRequest
from quire.server.http.sse import cancel_on_disconnect
from quire.server.images.image_parts import UnfetchedImagesError
from quire.server.pipeline.read import read_body
from quire.server.resolve.checks import NeedsWorker, copied_param_sizes
from quire.server.resolve.parse import BodyType, parse_body_as
from quire.server.resolve.resolved_generation import ResolvedGeneration
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import ServedModel, get_model

Resolution = TypeVar("Resolution")
Resolver = Callable[[bytes, ServedModel, ServerConfig], Resolution]
"""May raise ModelNotFound, InvalidRequest with the parameter's name, NeedsWorker and UnfetchedImagesError."""

QUICK_BYTES, SMALL_BYTES = 1024, 4096
"""Quick bodies share a turn of the event loop. A small body takes about a millisecond and has its own turn. Larger
bodies go to a worker.
"""
BYTES_PER_TOKEN_ID = 32
"""Bytes of memory that a token id in a copied parameter takes in addition to its bytes in a pickled message."""


async def resolve_body(
    request: Request,
    resolve: Resolver[Resolution],
    keep_body: Callable[[Sequence[bytes]], None] | None = None,
    *,
    extra_bytes: int = 0,
) -> Resolution:
    """`extra_bytes`: size of the resolver's other input. The result's memory counts until the request is answered.
    Raises the errors of `resolve`, read_body, WorkerPool.run_job and MemoryLease.grow_lease.
    """
    async with read_body(request) as body:
        chunks = () if keep_body is None else tuple(body.chunks)
        resolution = await _resolve_here_or_in_worker(request, body, resolve, extra_bytes)
        if keep_body is not None:
            keep_body(chunks)
        return resolution


async def parse_request_body(request: Request, body_type: type[BodyType]) -> BodyType:
    """Raises the errors of `resolve_body`."""
    return await resolve_body(request, partial(parse_body_as, body=body_type))


async def check_grammars(request: Request, resolved: ResolvedGeneration) -> GenerationRequest:
    """Raises the errors of GrammarChecker.choose_compilable_grammar."""
    if not resolved.grammars.to_check:
        return resolved.request
    checker, tenant = get_runtime(request).grammar_checker, tenant_of(request.scope)
    checking = checker.choose_compilable_grammar(resolved, tenant, get_model(request))
    return resolved.request.with_checked_grammar(await cancel_on_disconnect(request.receive, checking))


async def _resolve_here_or_in_worker(
    request: Request, body: BodyBuffer, resolve: Resolver[Resolution], extra_bytes: int
) -> Resolution:
    runtime, is_slow = get_runtime(request), False
    size = body.received_bytes + extra_bytes
    try:
        if size <= QUICK_BYTES:
            return resolve(b"".join(body.chunks), get_model(request), runtime.config)
        if size <= SMALL_BYTES:
            async with runtime.loop_work_pacer:
                return resolve(b"".join(body.chunks), get_model(request), runtime.config)
    except NeedsWorker:
        is_slow = True
    tenant = tenant_of(request.scope)
    try:
        working = runtime.workers.run_job(
            partial(resolve_and_measure, resolve=resolve),
            body.chunks,
            tenant,
            is_slow=is_slow,
            extra_bytes=extra_bytes,
        )
        resolution, size = await cancel_on_disconnect(request.receive, working)
    except UnfetchedImagesError as needed:
        fetching = _fetch_images(runtime, tenant, needed.fields_by_url, partial(grow_request_lease, request.scope))
        images = await cancel_on_disconnect(request.receive, fetching)
        job = partial(resolve_and_measure, resolve=partial(resolve_with_images, resolve=resolve, images=images))
        image_bytes = sum(map(len, images.values()))
        working = runtime.workers.run_job(
            job, body.chunks, tenant, is_slow=is_slow, extra_bytes=extra_bytes + image_bytes
        )
        resolution, size = await cancel_on_disconnect(request.receive, working)
    try:
        grow_request_lease(request.scope, size)
    except Exception:
        del resolution  # the error's traceback would keep the result in memory
        raise
    return resolution


async def _fetch_images(
    runtime: ModelRuntime, tenant: Tenant, urls: Mapping[str, str], grow_lease: Callable[[int], None]
) -> dict[str, bytes]:
    """Raises the errors of ImageFetcher.fetch_images."""
    async with runtime.fetch_semaphore.hold_slot(tenant.name):
        return await runtime.image_fetcher.fetch_images(urls, grow_lease)


def resolve_with_images(
    body: bytes,
    model: ServedModel,
    config: ServerConfig,
    *,
    resolve: Resolver[Resolution],
    images: dict[str, bytes],
) -> Resolution:
    """Runs in a worker."""
    return resolve(body, replace(model, fetched_images=images), config)


def resolve_and_measure(
    body: bytes, model: ServedModel, config: ServerConfig, *, resolve: Resolver[Resolution]
) -> tuple[Resolution, int]:
    """Also returns the result's size in bytes, without the token ids of prompts, which the queue limits. Runs in a
    worker.
    """
    resolution = resolve(body, model, config)
    measured: object = resolution
    num_ids = num_pixel_bytes = 0
    if isinstance(resolution, ResolvedGeneration):
        resolved = resolution.request
        to_check = resolution.grammars.to_check
        grammar = to_check[-1][1] if to_check else None
        num_ids = sum(copied_param_sizes(resolved.params, grammar).values())
        num_pixel_bytes = sum(len(image.pixels) for prompt in resolved.prompts for image in prompt.images)
        prompts = [replace(prompt, ids=[], images=()) for prompt in resolved.prompts]
        measured = replace(resolution, request=replace(resolved, prompts=prompts))
    elif isinstance(resolution, VectorRequest):
        num_pixel_bytes = sum(len(image.pixels) for each in resolution.inputs for image in each.images)
        measured = replace(resolution, inputs=())
    pickled_bytes = len(pickle.dumps(measured, pickle.HIGHEST_PROTOCOL))
    return resolution, pickled_bytes + BYTES_PER_TOKEN_ID * num_ids + num_pixel_bytes
