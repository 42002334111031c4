"""Who is replayed with whom: killers are found and given up, nobody else is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.replay import STRIKES, Replay


class World:
    """Engines that die when a killer is among what they compute; the others get one token per step."""

    def __init__(self, names: list[str], killers: set[str], patience: int = 3) -> None:
        self.replay = Replay()
        self.left = dict.fromkeys(names, patience)
        self.killers = killers
        self.running: list[str] = []
        self.given_up: list[str] = []
        self.deaths = 0
        for name in names:
            self.replay.add(name)

    def step(self, killed_from_outside: bool = False) -> None:
        self.running += self.replay.release()
        assert len(set(self.running)) == len(self.running), "a request was sent twice"
        if killed_from_outside or self.killers & set(self.running):
            self.deaths += 1
            self.given_up += self.replay.engine_died()
            self.running = []
            return
        for name in list(self.running):
            self.left[name] -= 1
            if self.left[name]:
                self.replay.progress(name)
            else:
                self.replay.end(name)
                self.running.remove(name)

    def open(self) -> set[str]:
        return {name for name, left in self.left.items() if left} - set(self.given_up)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=3), st.lists(st.booleans(), max_size=12))
def test_killers_are_given_up_and_all_others_complete(count: int, killers: set[int], outside: list[bool]) -> None:
    names = [str(i) for i in range(count)]
    guilty = {str(i) for i in killers if i < count}
    world = World(names, guilty)
    for kill in outside:
        world.step(kill)
    for _ in range(400):
        if not world.open():
            break
        world.step()
    assert not world.open()
    innocent_lost = set(world.given_up) - guilty
    assert not innocent_lost or sum(outside) >= STRIKES, "three kills in a row during lone replays could mislead us"
    assert guilty <= set(world.given_up)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 40), st.lists(st.booleans(), max_size=60))
def test_kills_from_outside_lose_nobody(count: int, outside: list[bool]) -> None:
    world = World([str(i) for i in range(count)], set(), patience=50)
    for kill in outside:
        world.step(kill)
        if kill and len(world.running) == 0:
            world.step()  # an engine lives at least for a step
    assert world.given_up == []


def test_a_lone_killer_costs_few_lives() -> None:
    world = World([str(i) for i in range(64)], {"17"})
    while world.open():
        world.step()
    assert world.given_up == ["17"]
    assert world.deaths <= 2 + 6 + STRIKES


def test_new_requests_wait_while_suspects_are_tried() -> None:
    world = World(["a", "b"], {"a"})
    for _ in range(2):
        world.step()
    world.replay.add("new")
    world.left["new"] = 1
    world.running += world.replay.release()
    assert world.running == ["a"], "a suspect alone; b and the new one wait"
    while world.open():
        world.step()
    assert world.given_up == ["a"]


def test_requests_that_end_while_they_wait_are_not_sent() -> None:
    replay = Replay()
    for name in "abc":
        replay.add(name)
    replay.end("b")
    assert replay.release() == ["a", "c"]
    replay.engine_died()
    replay.end("a")
    assert replay.release() == ["c"]
    replay.end("c")
    assert replay.engine_died() == []
    assert replay.release() == []
