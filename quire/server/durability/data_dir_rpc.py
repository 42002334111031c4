"""One API process owns --data-dir (`serve_data_dir_call`). The others call the owner (`remote_data_dir`), but access
file contents directly. The messages keep their form and tags, because Ray replaces replicas one by one, and an old
replica must read a new one's answers.
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

from quire.engine.common.errors import QuireError
from quire.engine.processes.utility_calls import Fault, method_call_codec
from quire.server.durability.data_dir import DataDir, Processes
from quire.server.durability.journal import Calls
from quire.server.encoding import encode_msgpack
from quire.server.store.batches import Batches
from quire.server.store.files import FileContents, Files
from quire.server.store.owner_executor import OwnerExecutor
from quire.server.store.response_store import Store

log = logging.getLogger("quire.server")
DATA_DIR_TOPIC = "data"
RPC_METHODS: dict[str, Callable[..., Any]] = {
    "Store.get": Store.get_without_items,
    "Store.known": Store.get_summary,
    "Store.put": Store.put,
    "Store.append": Store.append_items,
    "Store.describe": Store.replace_metadata,
    "Store.page": Store.read_item_page,
    "Store.item": Store.get_item,
    "Store.delete_item": Store.delete_item,
    "Store.delete": Store.delete,
    "Store.lose": Store.mark_response_failed,
    "Files.reserve": Files.try_reserve_bytes,
    "Files.release": Files.release,
    "Files.add": Files.add,
    "Files.find": Files.find,
    "Files.page": Files.page,
    "Files.delete": Files.delete,
    "Files.expired": Files.list_expired_files,
    "Batches.add": Batches.add,
    "Batches.cancel": Batches.cancel,
    "Batches.finalize": Batches.mark_finalizing,
    "Batches.end": Batches.end,
    "Batches.find": Batches.find,
    "Batches.page": Batches.page,
    "Batches.open": Batches.list_open_batches,
    "Batches.set_lines": Batches.store_lines_and_batch,
    "Batches.reads": Batches.is_file_in_use,
    "Batches.left": Batches.list_unanswered_lines,
    "Batches.put_result": Batches.put_result,
    "Batches.results": Batches.list_result_lines,
    "Calls.put": Calls.put,
    "Calls.note": Calls.update_progress,
    "Calls.claim": Calls.try_claim_call,
    "Calls.give_up": Calls.release_claim,
    "Calls.holder": Calls.answering_process,
    "Calls.find": Calls.find,
    "Calls.of_key": Calls.find_by_idempotency_key,
    "Calls.delete": Calls.delete,
    "Processes.look": Processes.exchange_status,
    "Processes.left": Processes.list_abandoned_responses,
    "Processes.sweep": Processes.delete_due_data,
}
"""Wire names must survive renames."""
_SLOW_METHODS = ("Store.put", "Store.append", "Store.delete")
_WIRE_NAMES = {method.__qualname__: name for name, method in RPC_METHODS.items()}


class _RPCRequest(msgspec.Struct, frozen=True, array_like=True):
    method: str
    arguments: msgspec.Raw


class _Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    result: msgspec.Raw


class _Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    fault: Fault


class _StorageFailed(msgspec.Struct, frozen=True, tag="_NoDisk", array_like=True):
    message: str
    number: int | None
    """An OSError's errno; None for a sqlite3.OperationalError."""

    def error(self) -> Exception:
        return sqlite3.OperationalError(self.message) if self.number is None else OSError(self.number, self.message)


class _Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An internal error, which the owner has logged."""

    message: str


_SLOW_REQUEST_STARTS = tuple(encode_msgpack(_RPCRequest(name, msgspec.Raw(b""))) for name in _SLOW_METHODS)
"""A request begins with its method's name, so the event loop need not decode it."""
_decode_request = msgspec.msgpack.Decoder(_RPCRequest).decode
_decode_reply = msgspec.msgpack.Decoder(_Done | _Refused | _StorageFailed | _Failed).decode


async def serve_data_dir_call_in_thread(data: DataDir, encoded_request: bytes) -> bytes:
    """Slow methods run in the owner executor's threads, so that short methods need not wait for them."""
    is_slow = encoded_request.startswith(_SLOW_REQUEST_STARTS)
    return await asyncio.get_running_loop().run_in_executor(
        data.owner_executor.pool if is_slow else None, serve_data_dir_call, data, encoded_request
    )


def serve_data_dir_call(data: DataDir, encoded_request: bytes) -> bytes:
    try:
        request = _decode_request(encoded_request)
        method = RPC_METHODS[request.method]
        form = method_call_codec(method)
        store = getattr(data, request.method.partition(".")[0].lower())
        arguments = form.arguments_decoder.decode(request.arguments)
        result = getattr(store, method.__name__)(**msgspec.structs.asdict(arguments))
        return encode_msgpack(_Done(msgspec.Raw(encode_msgpack(result))))
    except QuireError as error:
        return encode_msgpack(_Refused(Fault.of(error)))
    except sqlite3.OperationalError as error:
        return encode_msgpack(_StorageFailed(str(error), None))
    except OSError as error:
        return encode_msgpack(_StorageFailed(error.strerror or str(error), error.errno or 0))
    except Exception as error:
        log.exception("a call of an API process to data_dir failed")
        return encode_msgpack(_Failed(f"{type(error).__name__}: {error}"))


class _RPCProxy:
    def __init__(self, store_class: type, send_request: Callable[[bytes], bytes]) -> None:
        self._store_class = store_class
        self._send_request = send_request

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call_method, _WIRE_NAMES[f"{self._store_class.__name__}.{method}"])

    def _call_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        form = method_call_codec(RPC_METHODS[method])
        request = _RPCRequest(method, msgspec.Raw(encode_msgpack(form.arguments_type(*args, **kwargs))))
        match _decode_reply(self._send_request(encode_msgpack(request))):
            case _Done(result):
                return form.result_decoder.decode(result)
            case _Refused(fault):
                raise fault.error()
            case _StorageFailed() as refused:
                raise refused.error()
            case _Failed(message):
                raise RuntimeError(f"{method}: {message}")


def remote_data_dir(folder: Path, send_request: Callable[[bytes], bytes]) -> DataDir:
    """The returned object's methods wait for the owner's disk, so call them in threads."""

    def remote_store(store_class: type) -> Any:
        return _RPCProxy(store_class, send_request)

    return DataDir(
        store=remote_store(Store),
        files=remote_store(Files),
        contents=FileContents(folder),
        batches=remote_store(Batches),
        calls=remote_store(Calls),
        processes=remote_store(Processes),
        owner_executor=OwnerExecutor(),
        close=lambda: None,
    )
