"""The application of several models: what it holds of a request's body, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.fleet import app as fleet_module
from quire.server.fleet.added import Added
from quire.server.fleet.app import FleetApp
from quire.server.fleet.config import Bounds, FleetConfig, ModelEntry
from quire.server.fleet.fleet import Fleet, Member
from tests.server.api import make_app
from tests.server.fake import FakeEngine, hashed

KIB = 1024
BODY = 200 * KIB


def refuse(*_: object) -> None:
    raise AssertionError("the tests load models by hand")


@asynccontextmanager
async def opened(*names: str) -> AsyncIterator[tuple[FleetApp, list[Member], httpx.AsyncClient]]:
    config = ServerConfig(max_body_size=1 / 4)
    entries = tuple(ModelEntry(name, ServerConfig(served_model_name=[name]), 0.0, 1) for name in names)
    models = FleetConfig(entries, None, 1.0, Bounds(), {})
    fleet = Fleet(models, refuse)
    app = FleetApp(fleet, models, Added(models, None), config, Tenants(config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://quire") as http:
        yield app, fleet.members, http


async def load(member: Member, engine: FakeEngine, until: AsyncExitStack, folder: Path | None = None) -> None:
    app = make_app(engine, served_model_name=[member.entry.name], data_dir=folder)
    await until.enter_async_context(app.router.lifespan_context(app))
    member.app = app
    member.changed.set()


def body(model: str | None) -> dict[str, object]:
    """It takes two of these to fill the budget."""
    return {"prompt": "x", "max_tokens": 3, "user": "u" * BODY} | ({} if model is None else {"model": model})


async def test_a_body_stays_in_the_budget_until_its_model_has_taken_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "BODIES_BYTES", 2 * 256 * KIB)
    async with opened("a") as (app, _, http):
        posts = [asyncio.create_task(http.post("/v1/completions", json=body("a"))) for _ in range(5)]
        async with asyncio.timeout(10):
            while app._bodies.held < 2 * BODY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for _ in range(20):
                await asyncio.sleep(0)
            assert 2 * BODY < app._bodies.held < 3 * BODY
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)
    assert app._bodies.held == 0


async def test_what_names_no_model_is_lent_to_each_of_them(tmp_path: Path) -> None:
    async with opened("a", "b") as (app, members, http), AsyncExitStack() as until:
        for member in members:
            await load(member, FakeEngine(hashed(b"ab")), until, tmp_path / member.entry.name)
        made = (await http.post("/v1/conversations?model=b", json={"metadata": {"k": "u"}})).json()
        changed = await http.post(f"/v1/conversations/{made['id']}", json={"metadata": {"k": "v" * 500}})
        assert changed.json()["metadata"] == {"k": "v" * 500}
        lost = await http.post("/v1/conversations/conv_none", json={"metadata": {"k": "v"}})
        assert lost.status_code == 404
        assert app._bodies.held == 0


async def test_a_model_that_takes_smaller_bodies_refuses_a_larger_one() -> None:
    async with opened("a") as (app, (member,), http), AsyncExitStack() as until:
        tight = make_app(FakeEngine(hashed(b"ab")), served_model_name=["a"], max_body_size=1 / 16)
        await until.enter_async_context(tight.router.lifespan_context(tight))
        member.app = tight
        assert (await http.post("/v1/completions", json=body("a"))).status_code == 413
        assert app._bodies.held == 0
