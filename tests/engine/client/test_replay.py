"""Replay quarantines the requests that crash engines, and no others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.replay import MAX_LONE_CRASHES, TOKENS_TO_CLEAR, Replay
from tests.tiers import examples

KILLS = st.lists(st.booleans(), max_size=60)
"""For each step, whether the engine is killed from outside."""


class FakeEngines:
    """A sequence of engines that compute up to `room` requests per step and crash when one of them is a killer.

    A killer harmlessly gets `fuse` tokens of its `tokens`; then every step that it is in crashes the engine.
    """

    def __init__(self, names: list[str], killers: set[str], *, tokens: int = 6, fuse: int = 0, room: int = 99) -> None:
        self.replay = Replay()
        self.tokens_left = dict.fromkeys(names, tokens)
        self.killers = killers
        self.kills_at = tokens - fuse
        """A killer crashes the engine when it has this many tokens left, or fewer."""
        self.room = room
        self.submitted: list[str] = []
        """Requests that the current engine has."""
        self.given_up: list[str] = []
        self.exits = 0
        for name in names:
            self.replay.add(name)

    def step(self, killed_from_outside: bool = False) -> None:
        self.submitted += self.replay.take_ready()
        assert len(set(self.submitted)) == len(self.submitted), "a request was submitted twice"
        running = self.submitted[: self.room]
        self.replay.begin(running)
        if killed_from_outside or any(self.tokens_left[name] <= self.kills_at for name in self.killers & set(running)):
            self._exit(killed_from_outside)
            return
        for name in running:
            self.tokens_left[name] -= 1
            if self.tokens_left[name]:
                self.replay.progress(name, 1)
            else:
                self.replay.end(name)
                self.submitted.remove(name)

    def _exit(self, external: bool) -> None:
        self.exits += 1
        for name in self.replay.engine_exited(external=external):
            self.given_up.append(name)
            self.replay.end(name)
        self.submitted = []

    def finish(self) -> None:
        for _ in range(2000):
            if not self.open():
                return
            self.step()
        pytest.fail(f"still open: {self.open()}")

    def open(self) -> set[str]:
        return {name for name, left in self.tokens_left.items() if left} - set(self.given_up)


@settings(deadline=None, max_examples=examples(300))
@given(
    count=st.integers(1, 40),
    killers=st.sets(st.integers(0, 39), max_size=3),
    fuse=st.integers(0, 3),
    room=st.integers(1, 50),
    kills=KILLS,
)
def test_replay_quarantines_killers_and_completes_all_others(
    count: int, killers: set[int], fuse: int, room: int, kills: list[bool]
) -> None:
    killer_names = {str(i) for i in killers if i < count}
    engines = FakeEngines([str(i) for i in range(count)], killer_names, fuse=fuse, room=room)
    for kill in kills:
        engines.step(kill)
    engines.finish()
    assert sorted(engines.given_up) == sorted(killer_names)
    assert engines.replay.idle
    assert engines.replay.take_ready() == []


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1, 40), KILLS)
def test_external_kills_quarantine_no_request(count: int, kills: list[bool]) -> None:
    names = [str(i) for i in range(count)]
    engines = FakeEngines(names, set(), tokens=500)
    for kill in kills:
        engines.step(kill)
        if kill:
            assert sorted(engines.replay.take_ready()) == sorted(names), "all are replayed together"
            engines.replay.engine_exited(external=True)
    assert engines.given_up == []


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1, 300), st.data())
def test_replay_finds_single_killer_by_bisection(count: int, data: st.DataObject) -> None:
    killer = str(data.draw(st.integers(0, count - 1)))
    engines = FakeEngines([str(i) for i in range(count)], {killer}, room=300)
    engines.finish()
    assert engines.exits <= MAX_LONE_CRASHES + 1 + (count - 1).bit_length()


def test_replay_finds_killer_that_decodes_before_each_crash() -> None:
    class CrashWhenDecoding(FakeEngines):
        """Request 17 gets its first token from each engine; the step after it crashes the engine."""

        def step(self, killed_from_outside: bool = False) -> None:
            self.kills_at = self.tokens_left["17"] if "17" in self.submitted else 0
            super().step(killed_from_outside)

    engines = CrashWhenDecoding([str(i) for i in range(64)], {"17"}, tokens=200)
    engines.finish()
    assert engines.given_up == ["17"]
    assert engines.exits <= MAX_LONE_CRASHES + 7


def test_replay_does_not_suspect_queued_requests() -> None:
    replay = Replay()
    for name in ("first", "second", "queued"):
        replay.add(name)
    replay.take_ready()
    replay.begin(["first", "second", "unknown"])
    replay.progress("second", TOKENS_TO_CLEAR)
    replay.engine_exited(external=False)
    assert replay.take_ready() == ["first"]
    replay.begin(["first"])
    replay.progress("first", TOKENS_TO_CLEAR - 1)
    assert replay.take_ready() == []
    replay.progress("first", 1)
    assert replay.take_ready() == ["second", "queued"]


def test_replay_finds_killer_that_crashes_before_begin() -> None:
    replay = Replay()
    for name in ("good", "bad"):
        replay.add(name)
    given_up = []
    for _ in range(10):
        submitted = replay.take_ready()
        replay.begin(["good"] if "good" in submitted else [])
        replay.progress("good", TOKENS_TO_CLEAR)
        if "bad" not in submitted:
            submitted += replay.take_ready()
        if "bad" in submitted:
            given_up = replay.engine_exited(external=False)
        if given_up:
            break
    assert given_up == ["bad"]


def test_new_requests_wait_while_suspect_is_isolated() -> None:
    engines = FakeEngines(["a", "b"], {"a"})
    engines.step()
    engines.replay.add("new")
    engines.tokens_left["new"] = 1
    engines.submitted += engines.replay.take_ready()
    assert engines.submitted == ["a"], "one suspect is replayed alone; b and the new request wait"
    engines.finish()
    assert engines.given_up == ["a"]


def test_external_kill_does_not_clear_suspect() -> None:
    engines = FakeEngines(["a", "b", "c"], {"a"}, tokens=50)
    engines.step()
    for _ in range(10):
        assert engines.replay.take_ready() == ["a", "b"]
        engines.replay.engine_exited(external=True)
    engines.finish()
    assert (engines.given_up, engines.exits) == (["a"], 1 + 1 + MAX_LONE_CRASHES)


def test_cleared_request_resets_lone_crash_count() -> None:
    replay = Replay()
    replay.add("a")
    for _ in range(3):
        assert replay.take_ready() == ["a"]
        assert replay.engine_exited(external=False) == []
        assert replay.take_ready() == ["a"]
        replay.progress("a", TOKENS_TO_CLEAR)
        replay.engine_exited(external=False)


def test_replay_does_not_submit_requests_that_ended_while_waiting() -> None:
    replay = Replay()
    for name in "abc":
        replay.add(name)
    replay.end("b")
    assert replay.take_ready() == ["a", "c"]
    replay.engine_exited(external=False)
    replay.end("a")
    assert replay.take_ready() == ["c"]
    replay.end("c")
    assert replay.engine_exited(external=False) == []
    assert replay.take_ready() == []


def test_external_kills_are_not_counted_and_delay_no_requests() -> None:
    replay = Replay()
    replay.add("a")
    for external in (False, *[True] * 10):
        assert replay.take_ready() == ["a"]
        replay.begin(["a"])
        assert replay.engine_exited(external=external) == []
    replay.end("a")
    replay.add("b")
    replay.take_ready()
    replay.begin(["b"])
    replay.engine_exited(external=True)
    replay.add("new")
    assert replay.take_ready() == ["b", "new"]
