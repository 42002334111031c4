"""Who is replayed with whom: killers are found and given up, nobody else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.replay import CLEARED, STRIKES, Replay

OUTSIDE = st.lists(st.booleans(), max_size=60)


class World:
    """Engines with `room` requests in a step at most, that end when a killer is among them.

    A killer ends the engine in the step after its `fuse`-th token, and whenever it is computed again from there on.
    """

    def __init__(self, names: list[str], killers: set[str], *, tokens: int = 6, fuse: int = 0, room: int = 99) -> None:
        self.replay = Replay()
        self.left = dict.fromkeys(names, tokens)
        self.killers = killers
        self.armed_at = tokens - fuse
        self.room = room
        self.engine: list[str] = []
        self.given_up: list[str] = []
        self.deaths = 0
        for name in names:
            self.replay.add(name)

    def step(self, killed_from_outside: bool = False) -> None:
        self.engine += self.replay.release()
        assert len(set(self.engine)) == len(self.engine), "a request was sent twice"
        running = self.engine[: self.room]
        self.replay.begin(running)
        if killed_from_outside or any(self.left[name] <= self.armed_at for name in self.killers & set(running)):
            self._die(killed_from_outside)
            return
        for name in running:
            self.left[name] -= 1
            if self.left[name]:
                self.replay.progress(name, 1)
            else:
                self.replay.end(name)
                self.engine.remove(name)

    def _die(self, outside: bool) -> None:
        self.deaths += 1
        for name in self.replay.engine_died(outside=outside):
            self.given_up.append(name)
            self.replay.end(name)
        self.engine = []

    def finish(self) -> None:
        for _ in range(2000):
            if not self.open():
                return
            self.step()
        pytest.fail(f"still open: {self.open()}")

    def open(self) -> set[str]:
        return {name for name, left in self.left.items() if left} - set(self.given_up)


@settings(deadline=None, max_examples=300)
@given(
    count=st.integers(1, 40),
    killers=st.sets(st.integers(0, 39), max_size=3),
    fuse=st.integers(0, 3),
    room=st.integers(1, 50),
    outside=OUTSIDE,
)
def test_killers_are_given_up_and_all_others_complete(
    count: int, killers: set[int], fuse: int, room: int, outside: list[bool]
) -> None:
    guilty = {str(i) for i in killers if i < count}
    world = World([str(i) for i in range(count)], guilty, fuse=fuse, room=room)
    for kill in outside:
        world.step(kill)
    world.finish()
    assert sorted(world.given_up) == sorted(guilty)
    assert world.replay.idle
    assert world.replay.release() == []


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), OUTSIDE)
def test_kills_from_outside_do_not_even_make_suspects(count: int, outside: list[bool]) -> None:
    names = [str(i) for i in range(count)]
    world = World(names, set(), tokens=500)
    for kill in outside:
        world.step(kill)
        if kill:
            assert sorted(world.replay.release()) == sorted(names), "all of them at once"
            world.replay.engine_died(outside=True)
    assert world.given_up == []


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.data())
def test_a_lone_killer_costs_few_lives(count: int, data: st.DataObject) -> None:
    killer = str(data.draw(st.integers(0, count - 1)))
    world = World([str(i) for i in range(count)], {killer}, room=300)
    world.finish()
    assert world.deaths <= STRIKES + 1 + (count - 1).bit_length()


def test_a_killer_that_first_gets_a_token_in_each_life_is_found() -> None:
    class Decoding(World):
        """Computing a prompt goes well; the step after it ends the engine."""

        def step(self, killed_from_outside: bool = False) -> None:
            self.armed_at = self.left["17"] if "17" in self.engine else 0
            super().step(killed_from_outside)

    world = Decoding([str(i) for i in range(64)], {"17"}, tokens=200)
    world.finish()
    assert world.given_up == ["17"]
    assert world.deaths <= STRIKES + 7


def test_who_had_not_begun_is_not_suspected() -> None:
    replay = Replay()
    for name in ("first", "second", "queued"):
        replay.add(name)
    replay.release()
    replay.begin(["first", "second", "never heard of"])
    replay.progress("second", CLEARED)
    replay.engine_died(outside=False)
    assert replay.release() == ["first"]
    replay.begin(["first"])
    replay.progress("first", CLEARED - 1)
    assert replay.release() == []
    replay.progress("first", 1)
    assert replay.release() == ["second", "queued"]


def test_one_that_ends_the_engine_before_it_begins_is_found() -> None:
    replay = Replay()
    for name in ("good", "bad"):
        replay.add(name)
    given_up = []
    for _ in range(10):
        sent = replay.release()
        replay.begin(["good"] if "good" in sent else [])
        replay.progress("good", CLEARED)
        if "bad" not in sent:
            sent += replay.release()
        if "bad" in sent:
            given_up = replay.engine_died(outside=False)
        if given_up:
            break
    assert given_up == ["bad"]


def test_new_requests_wait_while_suspects_are_tried() -> None:
    world = World(["a", "b"], {"a"})
    world.step()
    world.replay.add("new")
    world.left["new"] = 1
    world.engine += world.replay.release()
    assert world.engine == ["a"], "a suspect alone; b and the new one wait"
    world.finish()
    assert world.given_up == ["a"]


def test_a_kill_from_outside_does_not_clear_a_suspect() -> None:
    world = World(["a", "b", "c"], {"a"}, tokens=50)
    world.step()
    for _ in range(10):
        assert world.replay.release() == ["a", "b"]
        world.replay.engine_died(outside=True)
    world.finish()
    assert (world.given_up, world.deaths) == (["a"], 1 + 1 + STRIKES)


def test_strikes_count_in_a_row() -> None:
    replay = Replay()
    replay.add("a")
    for _ in range(3):
        assert replay.release() == ["a"]
        assert replay.engine_died(outside=False) == []
        assert replay.release() == ["a"]
        replay.progress("a", CLEARED)
        replay.engine_died(outside=False)


def test_requests_that_end_while_they_wait_are_not_sent() -> None:
    replay = Replay()
    for name in "abc":
        replay.add(name)
    replay.end("b")
    assert replay.release() == ["a", "c"]
    replay.engine_died(outside=False)
    replay.end("a")
    assert replay.release() == ["c"]
    replay.end("c")
    assert replay.engine_died(outside=False) == []
    assert replay.release() == []


def test_kills_from_outside_are_no_strikes_and_hold_up_nobody() -> None:
    replay = Replay()
    replay.add("a")
    for outside in (False, *[True] * 10):
        assert replay.release() == ["a"]
        replay.begin(["a"])
        assert replay.engine_died(outside=outside) == []
    replay.end("a")
    replay.add("b")
    replay.release()
    replay.begin(["b"])
    replay.engine_died(outside=True)
    replay.add("new")
    assert replay.release() == ["b", "new"]
