"""A waiting queue in which requests wait for adapters without delaying other requests.

An adapter keeps its slot while a request needs it, even if that request is preempted. If no slot is free, the adapters
with the fewest users accept no new users, so that no adapter waits forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.common import clock
from quire.engine.common.executor import AdapterLoader
from quire.engine.common.types import Adapter
from quire.engine.core.fair_queue import FairQueue
from quire.engine.core.request import Request

_LOAD_POLL_SECONDS = 0.005
"""How long an idle engine waits for a load before it checks for messages."""


@dataclass(slots=True)
class _AdapterSlot:
    number: int
    digest: str = ""
    name: str = ""
    is_ready: bool = False
    request_ids: set[str] = field(default_factory=set)
    is_closed: bool = False
    """Another adapter waits for this slot, so the slot accepts no new requests."""
    last_used: int = 0
    """The number of the last use, not a time."""


class AdapterQueue(FairQueue):
    def __init__(self, loader: AdapterLoader, slots: int) -> None:
        super().__init__()
        self._loader = loader
        self._slots = [_AdapterSlot(number) for number in range(1, slots + 1)]
        self._waiting_by_adapter: dict[str, list[Request]] = {}
        """Contains no empty lists."""
        self._num_uses = 0
        self._loads: list[tuple[str, float]] = []

    def push_request(self, request: Request) -> None:
        adapter = request.engine_request.adapter
        if adapter is None:
            return super().push_request(request)
        slot = self._find_slot(adapter)
        if slot is not None and request.engine_request.id in slot.request_ids:  # preempted
            return super().push_request(request)
        self._waiting_by_adapter.setdefault(adapter.digest, []).append(request)
        if slot is not None and slot.is_ready and not slot.is_closed:
            self._admit_requests(slot)

    def remove_request(self, request: Request) -> None:
        waiting = (
            self._waiting_by_adapter.get(request.engine_request.adapter.digest, [])
            if request.engine_request.adapter is not None
            else []
        )
        if request not in waiting:
            return super().remove_request(request)
        waiting.remove(request)
        if not waiting and request.engine_request.adapter is not None:
            del self._waiting_by_adapter[request.engine_request.adapter.digest]

    def adapter_slot(self, request: Request) -> int:
        slot = None if request.engine_request.adapter is None else self._find_slot(request.engine_request.adapter)
        assert request.engine_request.adapter is None or (slot is not None and slot.is_ready)
        return 0 if slot is None else slot.number

    def release_adapter(self, request: Request) -> None:
        if (
            request.engine_request.adapter is not None
            and (slot := self._find_slot(request.engine_request.adapter)) is not None
        ):
            slot.request_ids.discard(request.engine_request.id)

    def process_adapter_loads(self) -> Sequence[tuple[Request, str]]:
        if not self._waiting_by_adapter and all(slot.is_ready or not slot.digest for slot in self._slots):
            return ()
        failed: list[tuple[Request, str]] = []
        began = clock.monotonic()
        loaded = self._loader.install_finished_loads()
        seconds = (clock.monotonic() - began) / max(1, len(loaded))
        for number, error in loaded:
            slot = self._slots[number - 1]
            if error is None:
                slot.is_ready = True
                self._loads.append((slot.name, seconds))
                self._admit_requests(slot)
            else:
                failed += [
                    (waiting_request, error) for waiting_request in self._waiting_by_adapter.get(slot.digest, ())
                ]
                slot.digest = ""
        refused = {
            request.engine_request.adapter.digest for request, _ in failed if request.engine_request.adapter is not None
        }
        missing = [digest for digest in self._missing_adapters() if digest not in refused]
        for digest in list(missing):
            free = self._find_free_slot()
            if free is None:
                break
            missing.remove(digest)
            self._load_adapter(free, digest)
        self._update_closed_slots(len(missing))
        return failed

    def take_adapter_load_times(self) -> list[tuple[str, float]]:
        loads, self._loads = self._loads, []
        return loads

    def wait_for_loads(self) -> None:
        if self._waiting_by_adapter:
            self._loader.wait_for_any_load(_LOAD_POLL_SECONDS)

    def _find_slot(self, adapter: Adapter) -> _AdapterSlot | None:
        return next((slot for slot in self._slots if slot.digest == adapter.digest), None)

    def _missing_adapters(self) -> list[str]:
        loaded = {slot.digest for slot in self._slots}
        waiting = {
            digest: min(request.priority_key for request in requests)
            for digest, requests in self._waiting_by_adapter.items()
            if digest not in loaded
        }
        return sorted(waiting, key=lambda digest: waiting[digest])

    def _find_free_slot(self) -> _AdapterSlot | None:
        free = [slot for slot in self._slots if not slot.digest or (slot.is_ready and not slot.request_ids)]
        return min(free, key=lambda slot: (bool(slot.digest), slot.last_used), default=None)

    def _load_adapter(self, slot: _AdapterSlot, digest: str) -> None:
        adapter = self._waiting_by_adapter[digest][0].engine_request.adapter
        assert adapter is not None
        slot.digest = digest
        slot.name = adapter.name
        slot.is_ready = False
        slot.is_closed = False
        slot.request_ids = set()
        self._loader.load_adapter(slot.number, adapter)

    def _update_closed_slots(self, count: int) -> None:
        ready = [slot for slot in self._slots if slot.is_ready]
        order = sorted(ready, key=lambda slot: (not slot.is_closed, len(slot.request_ids), slot.last_used))
        for index, slot in enumerate(order):
            slot.is_closed = index < count
            if not slot.is_closed:
                self._admit_requests(slot)

    def _admit_requests(self, slot: _AdapterSlot) -> None:
        for request in self._waiting_by_adapter.pop(slot.digest, ()):
            slot.request_ids.add(request.engine_request.id)
            self._num_uses += 1
            slot.last_used = self._num_uses
            super().push_request(request)
