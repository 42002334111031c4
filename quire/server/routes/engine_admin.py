from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import VERSION
from quire.engine.client.weight_broadcast import Group, Tensor
from quire.engine.common.errors import ConfigError, InvalidRequest, Overloaded, Timeout
from quire.engine.common.executor import decode_results, encode_call
from quire.server.access.admission import EngineOptionalRoute, ModelRoute
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.http.sse import EventStream
from quire.server.observe.engine_trace import record_trace
from quire.server.observe.live_view import LiveViewStream
from quire.server.observe.recent_answers import list_adapter_states, merge_answer_summaries, summarize_recent_answers
from quire.server.pipeline.resolve import parse_request_body, resolve_body
from quire.server.protocol.operator_requests import (
    BroadcastTensor,
    CallRequest,
    UpdateWeightsRequest,
    WeightsGroupRequest,
)
from quire.server.resolve.parse import parse_body
from quire.server.routes.api_description import BodySchema
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import ServedModel, get_model

router = APIRouter(route_class=ModelRoute)
sleep_router = APIRouter(route_class=EngineOptionalRoute)


@router.get(
    "/v1/engine/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events, until you leave."}},
)
async def engine_events(request: Request) -> Response:
    """Streams the engine's state: `hello` with constants and the last five minutes, then `state` every half second.
    Costs nothing without a reader. server/observe/live_view.py and EngineView (engine/core/stats.py) describe the
    fields.
    """
    runtime = get_runtime(request)
    watcher = LiveViewStream(runtime.live_view)
    return EventStream(
        watcher.events(build_server_facts(runtime, get_model(request))), watcher.close_stream, {}, runtime.config
    )


@router.get("/v1/engine/requests", name="engine_requests", response_model=None)
async def list_recent_answers(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The last answers, latest first: phases, tokens, finish reasons and model. Also each tenant's share of all
    remembered answers (--request-history), and the adapters. Contains no texts of prompts or answers.
    """
    runtime = get_runtime(request)
    answers = summarize_recent_answers(runtime.request_log, runtime.client.history, limit)
    if peer_answers := await runtime.cross_process_observer.collect_peer_answer_summaries(limit):
        answers = merge_answer_summaries([answers, *peer_answers], limit)
    names = () if runtime.adapter_registry is None else runtime.adapter_registry.adapters_by_name
    return Response(
        encode_json(answers | {"adapters": list_adapter_states(runtime.client, names)}), media_type="application/json"
    )


@router.get("/v1/engine/requests/{request_id:path}/blocks", name="engine_block_table", response_model=None)
async def get_block_table(request_id: str, request: Request) -> Response:
    """The block table of an open request, whose id is the one in /v1/engine/events: at most 1,024 blocks, in order,
    with the number of requests that use each block. 404 if no engine has the request.
    """
    table = await get_runtime(request).live_view.get_block_table(request_id)
    return Response(encode_json(msgspec.structs.asdict(table)), media_type="application/json")


@router.get("/v1/engine/trace", name="engine_trace", response_model=None)
async def record_engine_trace(request: Request, seconds: Annotated[float, Query(gt=0, le=120)] = 5.0) -> Response:
    """Record for `seconds` seconds, then answer with a trace for ui.perfetto.dev."""
    return Response(await record_trace(get_runtime(request).client.history, seconds), media_type="application/json")


def build_server_facts(runtime: ModelRuntime, model: ServedModel) -> dict[str, object]:
    config = runtime.config
    return {
        "version": VERSION,
        "started": runtime.started_at,
        "models": model.names,
        "info": {name: value for name, value in msgspec.structs.asdict(runtime.info).items() if name != "model"},
        "limits": {
            "max_num_seqs": config.max_running_requests,
            "max_num_batched_tokens": runtime.info.step_tokens or config.max_step_tokens,
            "max_queued_requests": config.max_queued_requests,
            "enable_prefix_caching": config.enable_prefix_caching,
        },
    }


@sleep_router.post("/sleep", response_model=None)
async def sleep(
    request: Request,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: Literal["keep", "wait", "abort"] = "keep",
    refuse: bool = False,
) -> Response:
    """Free weights and KV cache until /wake_up. Level 2 also ends the engine's process, so that waking takes seconds.
    `mode` decides about open requests: they wait and continue (keep), finish first (wait) or end at once (abort). New
    requests wait, or get 503 with `refuse`.
    """
    await get_runtime(request).weight_controller.sleep(level, mode, refuse=refuse)
    return _sleep_state_response(request)


@sleep_router.post("/wake_up", response_model=None)
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Restore weights and KV cache, whatever vLLM's `tags` say. 503 if there is no room; the model then stays
    asleep.
    """
    try:
        await get_runtime(request).weight_controller.wake_up()
    except ConfigError as error:
        raise Overloaded(f"the model sleeps on: {error.message}", param=error.param) from None
    response = _sleep_state_response(request)
    if tags:
        response.headers["X-Ignored-Params"] = "tags"
    return response


@router.get("/is_sleeping", response_model=None)
async def is_sleeping(request: Request) -> Response:
    return _sleep_state_response(request)


@sleep_router.post("/update_weights", response_model=None, openapi_extra=BodySchema(UpdateWeightsRequest))
async def update_weights(request: Request) -> Response:
    """Serve other weights of the same shape without losing open requests: from a path, or as `tensors` over the group
    of /init_weights_group. 400 if they cannot be served; the old weights stay.
    """
    runtime = get_runtime(request)
    body = await resolve_body(request, _parse_weights_update)
    try:
        if body.path is not None:
            version = await runtime.weight_controller.update(body.path, body.mode, body.version)
        else:
            await runtime.weights_group.receive(_to_broadcast_tensors(body.tensors or [], runtime.info.weight_bytes))
            if not body.last:
                return _sleep_state_response(request)
            version = await runtime.weights_group.serve(body.mode, body.version)
    except ConfigError as error:
        raise InvalidRequest(error.message, param="path" if body.path is not None else "tensors") from None
    runtime.set_weights_version(version)
    return _sleep_state_response(request)


@router.post("/init_weights_group", response_model=None, openapi_extra=BodySchema(WeightsGroupRequest))
async def init_weights_group(request: Request) -> Response:
    """Join a torch.distributed group in which rank 0 will send weights. Answers when all members have joined."""
    body = await resolve_body(request, _parse_weights_group)
    group = Group(body.master_address, body.master_port, **body.model_dump(exclude={"master_address", "master_port"}))
    await get_runtime(request).weights_group.join(group)
    return _sleep_state_response(request)


@router.post("/close_weights_group", response_model=None)
async def close_weights_group(request: Request) -> Response:
    """Leave the group. Weights received over it stay in use."""
    await get_runtime(request).weights_group.leave()
    return _sleep_state_response(request)


@router.post("/collective_rpc", response_model=None, openapi_extra=BodySchema(CallRequest))
async def collective_rpc(request: Request) -> Response:
    """Call a method of all ranks between two steps. Needs --dev-endpoints."""
    runtime = get_runtime(request)
    if not runtime.config.dev_endpoints:
        raise InvalidRequest("Calls to the ranks are disabled: start the server with --dev-endpoints")
    body = await parse_request_body(request, CallRequest)
    try:
        async with asyncio.timeout(body.timeout):
            encoded_results = await runtime.client.engine_core.call(
                encode_call(body.method, body.args, body.call_kwargs)
            )
    except TimeoutError:
        raise Timeout(f"not all ranks answered in {body.timeout:g} s") from None
    if encoded_results is None:
        raise Overloaded("the engine is asleep or being replaced")
    results = json.dumps({"results": decode_results(encoded_results)}, default=repr)
    return Response(results, media_type="application/json")


def _parse_weights_update(body: bytes, model: ServedModel, config: ServerConfig) -> UpdateWeightsRequest:
    update = parse_body(body, UpdateWeightsRequest)
    if (update.path is None) == (update.tensors is None):
        raise InvalidRequest(f"either path or tensors must be given, not both{update.misspelling_hint()}", param="path")
    return update


def _parse_weights_group(body: bytes, model: ServedModel, config: ServerConfig) -> WeightsGroupRequest:
    group = parse_body(body, WeightsGroupRequest)
    if config.nnodes > 1:
        raise InvalidRequest(
            "nnodes: weights received over a process group reach only one machine; give each machine a path"
        )
    if group.rank >= group.world_size:
        raise InvalidRequest(f"rank must be less than world_size, {group.world_size}", param="rank")
    return group


def _to_broadcast_tensors(tensors: Sequence[BroadcastTensor], weight_bytes: int) -> list[Tensor]:
    """Raises InvalidRequest if the tensors have more numbers than the model would have with 2 bits per weight."""
    total_bytes = sum(4 * math.prod(each.shape) for each in tensors)
    if total_bytes > (max_bytes := 16 * weight_bytes):
        raise InvalidRequest(
            f"tensors: {total_bytes} bytes, and the model cannot have more than {max_bytes}", param="tensors"
        )
    return [Tensor(each.name, each.dtype, each.shape) for each in tensors]


def _sleep_state_response(request: Request) -> Response:
    client = get_runtime(request).client
    state = {"is_sleeping": client.engine_core.asleep, "weights_version": client.engine_core.weights_version}
    return Response(encode_json(state), media_type="application/json")
