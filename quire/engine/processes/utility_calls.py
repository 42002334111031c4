"""Calls another process's methods by name, for everything except requests, aborts and outputs. A class declares the
methods, and their signatures define the structs of arguments and results.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import cache
from itertools import count
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints, overload

import msgspec

from quire.engine.common import errors
from quire.engine.common.errors import ConfigError, EngineError, ModelError, QuireError

P = ParamSpec("P")
R = TypeVar("R")
START = 0
"""Call id of the result that says that a process has started, cannot start, or failed later."""
_NO_VALUE = msgspec.Raw(msgspec.msgpack.encode(None))

encode = msgspec.msgpack.Encoder().encode


class Fault(msgspec.Struct, frozen=True):
    kind: str
    """Name of the error's class in engine/common/errors.py."""
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: QuireError) -> Fault:
        return cls(type(error).__name__, error.message, error.param)

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind)
        if issubclass(kind, ModelError):  # its constructor differs, and the class adds no information
            kind = ConfigError
        error = kind(self.message, param=self.param)
        assert isinstance(error, QuireError)
        return error


class UtilityCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    method: str
    args: msgspec.Raw
    id: int | None = None
    """None if the call has no result."""


class UtilityResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    id: int
    value: msgspec.Raw = _NO_VALUE
    error: Fault | None = None


decode_call = msgspec.msgpack.Decoder(UtilityCall).decode
decode_utility_result = msgspec.msgpack.Decoder(UtilityResult).decode


class MethodCallCodec(NamedTuple):
    arguments_type: type[msgspec.Struct]
    arguments_decoder: msgspec.msgpack.Decoder[msgspec.Struct]
    result_decoder: msgspec.msgpack.Decoder[Any]


@cache
def method_call_codec(method: Callable[..., Any]) -> MethodCallCodec:
    """`method`: the unbound function of the declaring class."""
    hints = get_type_hints(method)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for each in list(inspect.signature(method).parameters.values())[1:]:
        default = () if each.default is each.empty else (each.default,)
        fields.append((each.name, hints[each.name], *default))
    arguments_type = msgspec.defstruct(
        method.__name__, fields, frozen=True, array_like=True, forbid_unknown_fields=True
    )
    decoders = msgspec.msgpack.Decoder(arguments_type), msgspec.msgpack.Decoder(hints["return"])
    return MethodCallCodec(arguments_type, *decoders)


def make_call(
    method: Callable[Concatenate[Any, P], object], id: int | None, *args: P.args, **kwargs: P.kwargs
) -> UtilityCall:
    arguments = method_call_codec(method).arguments_type(*args, **kwargs)
    return UtilityCall(method.__name__, msgspec.Raw(encode(arguments)), id)


def make_notification(method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs) -> UtilityCall:
    return make_call(method, None, *args, **kwargs)


def make_result(id: int, value: object) -> UtilityResult:
    return UtilityResult(id, msgspec.Raw(encode(value)))


def decode_arguments(declared: type, call: UtilityCall) -> dict[str, Any]:
    codec = method_call_codec(getattr(declared, call.method))
    return msgspec.structs.asdict(codec.arguments_decoder.decode(call.args))


def decode_result(method: Callable[..., R], result: UtilityResult) -> R:
    """Raises the call's error."""
    if result.error is not None:
        raise result.error.error()
    value: R = method_call_codec(method).result_decoder.decode(result.value)
    return value


def invoke(declared: type, owner: object, call: UtilityCall) -> Any:
    return getattr(owner, call.method)(**decode_arguments(declared, call))


def run_call(declared: type, owner: object, call: UtilityCall) -> UtilityResult | None:
    """Returns the call's result, or its QuireError, as a message. If the call has no result, a QuireError is raised.
    EngineError is always raised, because the process cannot continue after it.
    """
    try:
        value = invoke(declared, owner, call)
    except QuireError as error:
        if call.id is None or isinstance(error, EngineError):
            raise
        return UtilityResult(call.id, error=Fault.of(error))
    return None if call.id is None else make_result(call.id, value)


async def run_call_in_task(declared: type, owner: object, call: UtilityCall) -> UtilityResult:
    """The method may be a coroutine function. The process can continue after an error, so every QuireError becomes a
    result.
    """
    assert call.id is not None
    try:
        value = invoke(declared, owner, call)
        return make_result(call.id, await value if inspect.isawaitable(value) else value)
    except QuireError as error:
        return UtilityResult(call.id, error=Fault.of(error))


class UtilityCalls:
    def __init__(self, send: Callable[[UtilityCall], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._open: dict[int, tuple[Callable[..., Any], asyncio.Future[Any]]] = {}

    def number(self) -> int:
        return next(self._ids)

    @overload
    def begin(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]: ...

    @overload
    def begin(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[R]: ...

    def begin(
        self, method: Callable[Concatenate[Any, P], Any], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[Any]:
        """If the future is cancelled, the call is forgotten."""
        id = self.number()
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        result.add_done_callback(lambda _: self._open.pop(id, None))
        self._send(make_call(method, id, *args, **kwargs))  # before registering: nobody waits if this fails
        self._open[id] = method, result
        return result

    def resolve(self, message: UtilityResult) -> Any:
        """Returns the call's result; None for an error, or if nobody awaits the call."""
        method, future = self._open.pop(message.id, (None, None))
        if method is None or future is None or future.done():
            return None
        try:
            value = decode_result(method, message)
        except QuireError as error:
            future.set_exception(error)
            return None
        future.set_result(value)
        return value

    def end(self, error: QuireError) -> None:
        for _, future in list(self._open.values()):
            if not future.done():
                future.set_exception(error)
