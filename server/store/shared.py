"""--data-dir of several API processes: one process has it (`answer`), and each of them asks that one (`shared_data`).

What is asked is one of METHODS, with what it is given, as msgpack; both are decoded as the types that the method has.
Files' contents do not pass: each process reads and writes them itself.
"""

from __future__ import annotations

import inspect
import logging
import sqlite3
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import msgspec

from quire.engine.errors import QuireError
from quire.engine.link.hub_messages import Fault
from quire.server.store.batches import Batches
from quire.server.store.calls import Calls
from quire.server.store.data import Data, Processes
from quire.server.store.files import Contents, Files
from quire.server.store.store import Store

log = logging.getLogger("quire.server")
TOPIC = "data"
"""Of the questions to the process that has the data."""
METHODS: tuple[Callable[..., Any], ...] = (
    *(Store.get, Store.known, Store.put, Store.append, Store.describe, Store.page, Store.item, Store.delete_item),
    *(Store.delete, Store.lose),
    *(Files.room, Files.add, Files.find, Files.page, Files.delete, Files.expired),
    *(Batches.add, Batches.cancel, Batches.finalize, Batches.end, Batches.find, Batches.page, Batches.open),
    *(Batches.set_lines, Batches.left, Batches.put_result, Batches.results),
    *(Calls.put, Calls.note, Calls.claim, Calls.give_up, Calls.holder, Calls.find, Calls.of_key, Calls.delete),
    Calls.sweep,
    *(Processes.look, Processes.left),
)
"""What may be asked for, by parts of Data."""
_BY_NAME = {each.__qualname__: each for each in METHODS}


class _Question(msgspec.Struct, frozen=True, array_like=True):
    method: str
    """As `Calls.put`."""
    given: msgspec.Raw
    """The values of its parameters, in their order."""


class _Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    result: msgspec.Raw


class _Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """By a QuireError."""

    fault: Fault


class _NoDisk(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """By the disk, or by SQLite."""

    message: str
    number: int | None
    """Of an OSError; None: sqlite3.OperationalError."""

    def error(self) -> Exception:
        return sqlite3.OperationalError(self.message) if self.number is None else OSError(self.number, self.message)


class _Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """By a fault of ours, which the process that has the data logs."""

    message: str


class _Kind(NamedTuple):
    """How a method is asked for."""

    signature: inspect.Signature
    """Without `self`."""
    given: msgspec.msgpack.Decoder[tuple[Any, ...]]
    result: msgspec.msgpack.Decoder[Any]


_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_answer = msgspec.msgpack.Decoder(_Done | _Refused | _NoDisk | _Failed).decode


@cache
def _kind(method: str) -> _Kind:
    """Of one of METHODS. Raises KeyError for another."""
    function = _BY_NAME[method]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function)
    given: Any = tuple.__class_getitem__(tuple(hints[each.name] for each in parameters))
    decode = msgspec.msgpack.Decoder(given), msgspec.msgpack.Decoder(hints["return"])
    return _Kind(inspect.Signature(parameters), *decode)


def answer(data: Data, asked: bytes) -> bytes:
    """What a process is told that asks for something. In a thread, please."""
    try:
        question = _decode_question(asked)
        kind = _kind(question.method)
        part, _, method = question.method.partition(".")
        given = dict(zip(kind.signature.parameters, kind.given.decode(question.given), strict=True))
        result = getattr(getattr(data, part.lower()), method)(**given)
        return _encode(_Done(msgspec.Raw(_encode(result))))
    except QuireError as error:
        return _encode(_Refused(Fault.of(error)))
    except sqlite3.OperationalError as error:
        return _encode(_NoDisk(str(error), None))
    except OSError as error:
        return _encode(_NoDisk(error.strerror or str(error), error.errno or 0))
    except Exception as error:
        log.exception("what an API process asked of data_dir failed")
        return _encode(_Failed(f"{type(error).__name__}: {error}"))


class _Asked:
    """Stands for a part of the data: each of its methods is asked for."""

    def __init__(self, part: type, ask: Callable[[bytes], bytes]) -> None:
        self._part = part
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, f"{self._part.__name__}.{method}")

    def _call(self, method: str, *given: Any, **named: Any) -> Any:
        kind = _kind(method)
        bound = kind.signature.bind(*given, **named)
        bound.apply_defaults()
        asked = _Question(method, msgspec.Raw(_encode(tuple(bound.arguments.values()))))
        match _decode_answer(self._ask(_encode(asked))):
            case _Done(result):
                return kind.result.decode(result)
            case _Refused(fault):
                raise fault.error()
            case _NoDisk() as refused:
                raise refused.error()
            case _Failed(message):
                raise RuntimeError(f"{method}: {message}")


def shared_data(folder: Path, ask: Callable[[bytes], bytes]) -> Data:
    """What a process uses that has to ask for it; in threads alone, for an answer takes as long as the disk. `ask`
    gives the other process a question, and returns its answer."""

    def part(kind: type) -> Any:
        return _Asked(kind, ask)

    return Data(
        store=part(Store),
        files=part(Files),
        contents=Contents(folder),
        batches=part(Batches),
        calls=part(Calls),
        processes=part(Processes),
        close=lambda: None,
    )
