"""Functions that workers run in tests. They are sent by name, so they are in a module that workers can import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from pydantic import TypeAdapter

from quire.engine.common.errors import ContextLengthExceeded
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModel


def pid(given: bytes, model: ServedModel, config: ServerConfig) -> int:
    return os.getpid()


def length(given: bytes, model: ServedModel, config: ServerConfig) -> tuple[int, int, bool]:
    return len(given), len(model.tokenizer.encode(given.decode())), model.expendable


def keys(given: bytes, model: ServedModel, config: ServerConfig) -> list[str]:
    return [*config.api_key, *config.admin_api_key, *config.metrics_api_key]


def refusal(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    raise ContextLengthExceeded("too long", param="prompt")


def mistake(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    raise LookupError("our own mistake")


def endless(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    while True:
        pass


def asleep(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    time.sleep(600)


def greedy(given: bytes, model: ServedModel, config: ServerConfig) -> int:
    return len(bytearray(int(given)))


def stopped(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def busy(given: bytes, model: ServedModel, config: ServerConfig) -> str:
    """Use this many seconds of processor time."""
    end = time.process_time() + float(given)
    while time.process_time() < end:
        pass
    return "done"


def nested(given: bytes, model: ServedModel, config: ServerConfig) -> int:
    """Parse, in Rust code, JSON that takes much more memory than its bytes."""
    return len(TypeAdapter(list[Any]).validate_json(given))
