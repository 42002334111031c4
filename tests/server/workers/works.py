"""Functions that workers run in tests. They are sent by name, so they stand in a module of their own."""

from __future__ import annotations

import os
import time

from quire.engine.errors import ContextLengthExceeded
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModel


def pid(given: bytes, model: ServedModel, config: ServerConfig) -> int:
    return os.getpid()


def length(given: bytes, model: ServedModel, config: ServerConfig) -> tuple[int, int, bool]:
    return len(given), len(model.tokenizer.encode(given.decode())), model.expendable


def keys(given: bytes, model: ServedModel, config: ServerConfig) -> list[str]:
    return [*config.api_key, *config.admin_api_key]


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
