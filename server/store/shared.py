"""--data-dir of several API processes: one process has it (`answer`), and each of them asks that one (`shared_data`).

What is asked is a method's name and what it is given, pickled: both sides are the same program, and their socket is in
a folder that this user alone can enter. Files' contents do not pass: each process reads and writes them itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from quire.server.store.data import Data
from quire.server.store.files import Contents

TOPIC = "data"
"""Of the questions to the process that has the data."""
Part = Literal["store", "files", "batches", "calls", "processes"]


def answer(data: Data, asked: bytes) -> bytes:
    """What a process is told that asks for something. In a thread, please."""
    part, method, given, named = pickle.loads(asked)
    try:
        result = getattr(getattr(data, part), method)(*given, **named)
        return pickle.dumps((True, result), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)


class _Asked:
    """Stands for a part of the data: each of its methods is asked for."""

    def __init__(self, part: Part, ask: Callable[[bytes], bytes]) -> None:
        self._part = part
        self._ask = ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, *given: Any, **named: Any) -> Any:
        asked = pickle.dumps((self._part, method, given, named), pickle.HIGHEST_PROTOCOL)
        done, result = pickle.loads(self._ask(asked))
        if not done:
            raise result
        return result


def shared_data(folder: Path, ask: Callable[[bytes], bytes]) -> Data:
    """What a process uses that has to ask for it; in threads alone, for an answer takes as long as the disk. `ask`
    gives the other process a question, and returns its answer."""

    def part(name: Part) -> Any:
        return _Asked(name, ask)

    return Data(
        store=part("store"),
        files=part("files"),
        contents=Contents(folder),
        batches=part("batches"),
        calls=part("calls"),
        processes=part("processes"),
        close=lambda: None,
    )
