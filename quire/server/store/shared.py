"""--data-dir of several API processes: one process has it (`answer`), and each of them asks that one (`shared_data`).

What is asked is one of METHODS, with what it is given, as msgpack; both are decoded as the types that the method has.
Files' contents do not pass: each process reads and writes them itself.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.errors import QuireError
from quire.engine.link.hub_messages import Fault
from quire.server.encoding import form_of, pack
from quire.server.store.batches import Batches
from quire.server.store.calls import Calls
from quire.server.store.data import Data, Processes
from quire.server.store.files import Contents, Files
from quire.server.store.owner_threads import OwnerThreads
from quire.server.store.store import Store

log = logging.getLogger("quire.server")
TOPIC = "data"
"""Of the questions to the process that has the data."""
METHODS: tuple[Callable[..., Any], ...] = (
    *(Store.get, Store.known, Store.put, Store.append, Store.describe, Store.page, Store.item, Store.delete_item),
    *(Store.delete, Store.lose),
    *(Files.reserve, Files.release, Files.add, Files.find, Files.page, Files.delete, Files.expired),
    *(Batches.add, Batches.cancel, Batches.finalize, Batches.end, Batches.find, Batches.page, Batches.open),
    *(Batches.set_lines, Batches.reads, Batches.left, Batches.put_result, Batches.results),
    *(Calls.put, Calls.note, Calls.claim, Calls.give_up, Calls.holder, Calls.find, Calls.of_key, Calls.delete),
    *(Processes.look, Processes.left, Processes.sweep),
)
"""What may be asked for, by parts of Data."""
_LONG = (b"Store.put", b"Store.append", b"Store.delete")
_NAME_BYTES = 32
"""Bytes of a question among which the method's name is."""
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


_decode_question = msgspec.msgpack.Decoder(_Question).decode
_decode_answer = msgspec.msgpack.Decoder(_Done | _Refused | _NoDisk | _Failed).decode


async def answer_in_thread(data: Data, question: bytes) -> bytes:
    """As `answer`. What takes long does not wait in the threads of what is short."""
    takes_long = any(name in question[:_NAME_BYTES] for name in _LONG)
    return await asyncio.get_running_loop().run_in_executor(
        data.threads.pool if takes_long else None, answer, data, question
    )


def answer(data: Data, asked: bytes) -> bytes:
    """What a process is told that asks for something. In a thread, please."""
    try:
        question = _decode_question(asked)
        form = form_of(_BY_NAME[question.method])
        part, _, method = question.method.partition(".")
        given = dict(zip(form.signature.parameters, form.given.decode(question.given), strict=True))
        result = getattr(getattr(data, part.lower()), method)(**given)
        return pack(_Done(msgspec.Raw(pack(result))))
    except QuireError as error:
        return pack(_Refused(Fault.of(error)))
    except sqlite3.OperationalError as error:
        return pack(_NoDisk(str(error), None))
    except OSError as error:
        return pack(_NoDisk(error.strerror or str(error), error.errno or 0))
    except Exception as error:
        log.exception("what an API process asked of data_dir failed")
        return pack(_Failed(f"{type(error).__name__}: {error}"))


class _Asked:
    """Stands for a part of the data: each of its methods is asked for."""

    def __init__(self, part: type, ask: Callable[[bytes], bytes]) -> None:
        self._part = part
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, f"{self._part.__name__}.{method}")

    def _call(self, method: str, *given: Any, **named: Any) -> Any:
        form = form_of(_BY_NAME[method])
        bound = form.signature.bind(*given, **named)
        bound.apply_defaults()
        asked = _Question(method, msgspec.Raw(pack(tuple(bound.arguments.values()))))
        match _decode_answer(self._ask(pack(asked))):
            case _Done(result):
                return form.result.decode(result)
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
        threads=OwnerThreads(),
        close=lambda: None,
    )
