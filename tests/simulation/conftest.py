from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.clock import PROCESS
from tests.simulation.server import Program
from tests.simulation.several import programs


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def api_programs(tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    return programs(tmp_path_factory.mktemp("programs"), 3)


class _OfTheLiving(logging.Filter):
    """Drops log records of processes that have ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        process = PROCESS.get()
        return process is None or not process.dead


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    known, of_living = (
        [logging.getLogger(f"quire.{name}") for name in ("server", "supervisor", "client", "hub")],
        _OfTheLiving(),
    )
    for each in known:
        each.addFilter(of_living)
    yield
    for each in known:
        each.removeFilter(of_living)
