"""Hostile bodies from many callers get the right statuses, take little memory and leave the event loop responsive.

`make bench-hostile` measures times; these tests check only what a slow machine cannot explain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.attacks import ATTACKS, Attack
from tests.e2e.hostile import TENANTS, Watched, attacked, unnoticed, watched_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("hostile")) as server:
        yield server


@pytest.mark.parametrize("callers", [16, 1])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_hostile_body_does_not_affect_other_clients(watched: Watched, attack: Attack, callers: int) -> None:
    keys = [TENANTS[i % (len(TENANTS) - 1)] for i in range(callers)]
    overload_statuses = {408, 503} if callers > 1 else set()
    unnoticed(watched, lambda: asyncio.run(attacked(watched, attack, keys)), {*attack.statuses} | overload_statuses)
