"""The queue of waiting sequences when some of them need adapters. A sequence whose adapter is not in a slot waits
separately, so that it delays nobody else.

A slot belongs to its adapter as long as a sequence needs it, whether that sequence waits, runs or was preempted. When
another adapter is needed and all slots are in use, the slot with the fewest users takes no new ones. It becomes free
when its users have ended, so no adapter waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine import clock
from quire.engine.core.executor import AdapterLoader
from quire.engine.core.fairness import FairQueue
from quire.engine.core.request import Request
from quire.engine.types import Adapter

_PATIENCE = 0.005
"""How many seconds an idle engine waits for a load before it checks for messages."""


@dataclass(slots=True)
class _Slot:
    """A slot of the device, numbered from 1, and its adapter."""

    number: int
    digest: str = ""
    name: str = ""
    """The adapter's name when it was loaded."""
    ready: bool = False
    users: set[str] = field(default_factory=set)
    """The ids of the requests that need it."""
    closed: bool = False
    """It takes no new users, because another adapter waits for it."""
    used: int = 0
    """When it got its last user, counted in sequences."""


class AdapterQueue(FairQueue):
    def __init__(self, loader: AdapterLoader, slots: int) -> None:
        super().__init__()
        self._loader = loader
        self._slots = [_Slot(number) for number in range(1, slots + 1)]
        self._parked: dict[str, list[Request]] = {}
        """By adapter: the sequences that wait for it. There are no empty lists."""
        self._count = 0
        self._loads: list[tuple[str, float]] = []

    def push(self, request: Request) -> None:
        adapter = request.engine_request.adapter
        if adapter is None:
            return super().push(request)
        slot = self._slot_of(adapter)
        if slot is not None and request.engine_request.id in slot.users:  # it was preempted
            return super().push(request)
        self._parked.setdefault(adapter.digest, []).append(request)
        if slot is not None and slot.ready and not slot.closed:
            self._unpark(slot)

    def remove(self, request: Request) -> None:
        parked = (
            self._parked.get(request.engine_request.adapter.digest, [])
            if request.engine_request.adapter is not None
            else []
        )
        if request not in parked:
            return super().remove(request)
        parked.remove(request)
        if not parked and request.engine_request.adapter is not None:
            del self._parked[request.engine_request.adapter.digest]

    def adapter_slot(self, request: Request) -> int:
        slot = None if request.engine_request.adapter is None else self._slot_of(request.engine_request.adapter)
        assert request.engine_request.adapter is None or (slot is not None and slot.ready)
        return 0 if slot is None else slot.number

    def on_finished(self, request: Request) -> None:
        if (
            request.engine_request.adapter is not None
            and (slot := self._slot_of(request.engine_request.adapter)) is not None
        ):
            slot.users.discard(request.engine_request.id)

    def advance(self) -> Sequence[tuple[Request, str]]:
        if not self._parked and all(slot.ready or not slot.digest for slot in self._slots):
            return ()
        failed: list[tuple[Request, str]] = []
        began = clock.monotonic()
        loaded = self._loader.loaded()
        seconds = (clock.monotonic() - began) / max(1, len(loaded))
        for number, error in loaded:
            slot = self._slots[number - 1]
            if error is None:
                slot.ready = True
                self._loads.append((slot.name, seconds))
                self._unpark(slot)
            else:
                failed += [(engine_request, error) for engine_request in self._parked.get(slot.digest, ())]
                slot.digest = ""
        refused = {
            request.engine_request.adapter.digest for request, _ in failed if request.engine_request.adapter is not None
        }
        wanted = [digest for digest in self._wanted() if digest not in refused]
        for digest in list(wanted):
            free = self._free_slot()
            if free is None:
                break
            wanted.remove(digest)
            self._load(free, digest)
        self._close(len(wanted))
        return failed

    def take_adapter_loads(self) -> list[tuple[str, float]]:
        taken, self._loads = self._loads, []
        return taken

    def wait(self) -> None:
        if self._parked:
            self._loader.wait(_PATIENCE)

    def _slot_of(self, adapter: Adapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.digest == adapter.digest), None)

    def _wanted(self) -> list[str]:
        """The adapters that need a slot, ordered by their most urgent sequence."""
        have = {slot.digest for slot in self._slots}
        waiting = {
            digest: min(request.priority_key for request in seqs)
            for digest, seqs in self._parked.items()
            if digest not in have
        }
        return sorted(waiting, key=lambda digest: waiting[digest])

    def _free_slot(self) -> _Slot | None:
        """An empty slot; otherwise the least recently used slot without users."""
        free = [slot for slot in self._slots if not slot.digest or (slot.ready and not slot.users)]
        return min(free, key=lambda slot: (bool(slot.digest), slot.used), default=None)

    def _load(self, slot: _Slot, digest: str) -> None:
        adapter = self._parked[digest][0].engine_request.adapter
        assert adapter is not None
        slot.digest, slot.name, slot.ready, slot.closed, slot.users = digest, adapter.name, False, False, set()
        self._loader.load(slot.number, adapter)

    def _close(self, count: int) -> None:
        """Close `count` slots and open the others. Slots that are closed already come first, then those with the fewest
        users."""
        ready = [slot for slot in self._slots if slot.ready]
        order = sorted(ready, key=lambda slot: (not slot.closed, len(slot.users), slot.used))
        for index, slot in enumerate(order):
            slot.closed = index < count
            if not slot.closed:
                self._unpark(slot)

    def _unpark(self, slot: _Slot) -> None:
        for request in self._parked.pop(slot.digest, ()):
            slot.users.add(request.engine_request.id)
            self._count += 1
            slot.used = self._count
            super().push(request)
