"""Bodies that could stop all others, sent by many callers: right statuses, little memory, a loop that is never held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.attacks import ATTACKS, Attack
from tests.e2e.hostile import LAX, TENANTS, Watched, attacked, unnoticed, watched_server
from tests.tiers import slow

pytestmark = pytest.mark.slow

MAX_BLOCK = 0.05
"""Seconds of processor time that the event loop may spend without a turn."""
TRIED = [attack for i, each in enumerate(ATTACKS) for attack in ([each] if i % 3 == 0 else slow(each))]
"""A third of them with every change."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("hostile")) as server:
        yield server


@pytest.mark.parametrize(("callers", "bound"), [(16, LAX), *slow((1, MAX_BLOCK), (16, MAX_BLOCK))])
@pytest.mark.parametrize("attack", TRIED, ids=lambda attack: attack.name)
def test_nobody_else_notices(watched: Watched, attack: Attack, callers: int, bound: float) -> None:
    keys = [TENANTS[i % (len(TENANTS) - 1)] for i in range(callers)]
    refused = {408, 503} if callers > 1 else set()
    unnoticed(watched, lambda: asyncio.run(attacked(watched, attack, keys)), {*attack.statuses} | refused, bound)
