"""What one process of ours has another one do, beside what flows between them (requests, aborts, outputs): one of its
methods is called by its name.

The methods that a process answers are declared in a class. The signature of each says what is sent: a struct of its
parameters, and its result.
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
"""The id of a process's start, where that is a call of its configuration. An error is its result at any time: the
process cannot start, or not go on."""
_NO_VALUE = msgspec.Raw(msgspec.msgpack.encode(None))

encode = msgspec.msgpack.Encoder().encode


class Fault(msgspec.Struct, frozen=True):
    """An error on its way to another process."""

    kind: str
    """The name of its class in engine/common/errors.py."""
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: QuireError) -> Fault:
        return cls(type(error).__name__, error.message, error.param)

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind)
        if issubclass(kind, ModelError):  # which is made otherwise, and says no more
            kind = ConfigError
        error = kind(self.message, param=self.param)
        assert isinstance(error, QuireError)
        return error


class UtilityCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    method: str
    args: msgspec.Raw
    """A struct of the method's parameters: see MethodCallCodec."""
    id: int | None = None
    """Of the caller's calls; None: there is to be no result."""


class UtilityResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    id: int
    """Of the call."""
    value: msgspec.Raw = _NO_VALUE
    error: Fault | None = None
    """Why there is no value."""


decode_call = msgspec.msgpack.Decoder(UtilityCall).decode
decode_utility_result = msgspec.msgpack.Decoder(UtilityResult).decode


class MethodCallCodec(NamedTuple):
    """How a method of another process is called."""

    arguments_type: type[msgspec.Struct]
    """A struct of the method's parameters: an array on the wire."""
    arguments_decoder: msgspec.msgpack.Decoder[msgspec.Struct]
    result_decoder: msgspec.msgpack.Decoder[Any]


@cache
def method_call_codec(method: Callable[..., Any]) -> MethodCallCodec:
    """Of a method as its class has it."""
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
    """A call of a method as its class declares it."""
    arguments = method_call_codec(method).arguments_type(*args, **kwargs)
    return UtilityCall(method.__name__, msgspec.Raw(encode(arguments)), id)


def make_notification(method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs) -> UtilityCall:
    """A call that has no result."""
    return make_call(method, None, *args, **kwargs)


def make_result(id: int, value: object) -> UtilityResult:
    return UtilityResult(id, msgspec.Raw(encode(value)))


def decode_arguments(declared: type, call: UtilityCall) -> dict[str, Any]:
    """The arguments of a call of one of the methods that a class declares, by their names."""
    codec = method_call_codec(getattr(declared, call.method))
    return msgspec.structs.asdict(codec.arguments_decoder.decode(call.args))


def decode_result(method: Callable[..., R], result: UtilityResult) -> R:
    """Raises what the method has raised."""
    if result.error is not None:
        raise result.error.error()
    value: R = method_call_codec(method).result_decoder.decode(result.value)
    return value


def invoke(declared: type, owner: object, call: UtilityCall) -> Any:
    """Have `owner` do what it is called for."""
    return getattr(owner, call.method)(**decode_arguments(declared, call))


def run_call(declared: type, owner: object, call: UtilityCall) -> UtilityResult | None:
    """As `invoke`; returns the message with the result, if there is to be one. A QuireError is the result. Raised are
    those of a call that has none, and an EngineError, after which there is nobody to go on."""
    try:
        value = invoke(declared, owner, call)
    except QuireError as error:
        if call.id is None or isinstance(error, EngineError):
            raise
        return UtilityResult(call.id, error=Fault.of(error))
    return None if call.id is None else make_result(call.id, value)


async def run_call_in_task(declared: type, owner: object, call: UtilityCall) -> UtilityResult:
    """As `run_call`, of a call that has a result and may be of a coroutine. What runs beside the call goes on, so that
    each QuireError is a result."""
    assert call.id is not None
    try:
        value = invoke(declared, owner, call)
        return make_result(call.id, await value if inspect.isawaitable(value) else value)
    except QuireError as error:
        return UtilityResult(call.id, error=Fault.of(error))


class UtilityCalls:
    """The calls of this process to another one that have no result yet."""

    def __init__(self, send: Callable[[UtilityCall], None]) -> None:
        self._send = send
        self._ids = count(1)
        self._open: dict[int, tuple[Callable[..., Any], asyncio.Future[Any]]] = {}
        """By id the method, and the result to be."""

    def number(self) -> int:
        """The id of another call."""
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
        """The result of a method, as a class declares it, or what it raises. One that is cancelled is not waited for
        any more."""
        id = self.number()
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        result.add_done_callback(lambda _: self._open.pop(id, None))
        self._send(make_call(method, id, *args, **kwargs))  # before: where that fails, nobody waits
        self._open[id] = method, result
        return result

    def resolve(self, message: UtilityResult) -> Any:
        """A result has come. Returns its value; None for an error, and where nobody waits for it any more."""
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
        """All that has no result yet gets none, but this error."""
        for _, future in list(self._open.values()):
            if not future.done():
                future.set_exception(error)
