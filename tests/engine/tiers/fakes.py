"""Tiers and a page mover without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Event, Lock
from typing import Any

from quire.engine.common.executor import BlockMover
from quire.engine.tiers.block_loader import LOAD_TIMEOUT_SECONDS
from quire.engine.tiers.load_costs import LoadCosts
from quire.engine.tiers.tier import BlockContent, Tier
from quire.engine.tiers.tiered_offloader import TieredKVOffloader, TransferOptions
from tests.engine.fake_device import FakeDevice

assert LOAD_TIMEOUT_SECONDS > 5, "tests wait for slow tiers"


class Always(LoadCosts):
    """Fetching always pays, however fast the machine is."""

    def num_blocks_worth_loading(self, tiers: Sequence[str]) -> int:
        return len(tiers)


class Inline(Executor):
    """A ThreadPoolExecutor without threads: pages are in their tiers at once, however busy the machine is."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **named))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def always(tiers: Sequence[Tier], mover: BlockMover, _: LoadCosts, *rest: Any) -> TieredKVOffloader:
    """Makes Tiers that fetch whatever is there, though to compute these models' tokens may cost less; and that have at
    once what is put there."""
    return TieredKVOffloader(tiers, mover, Always(16), *rest, TransferOptions(store_threads=Inline))


def always_late(tiers: Sequence[Tier], mover: BlockMover, _: LoadCosts, *rest: Any) -> TieredKVOffloader:
    """The same by threads."""
    return TieredKVOffloader(tiers, mover, Always(16), *rest)


class FakeMover:
    """A BlockMover of a FakeDevice: 8 bytes stand for what a page holds."""

    block_bytes = 8
    layout = "fake"

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._contents: list[list[tuple[int, ...] | None]] = []
        self._lock = Lock()

    def announce_block_writes(self, pages: Sequence[int]) -> None:
        assert all(self._device.pages[page] for page in pages)

    def read_block(self, page: int) -> memoryview:
        with self._lock:
            content = list(self._device.pages[page])
            assert None not in content, "a copy of a page that is not full"
            self._contents.append(content)
            return memoryview((len(self._contents) - 1).to_bytes(8, "little"))

    def write_block(self, page: int, content: bytes | memoryview) -> None:
        self._device.pages[page] = list(self._contents[int.from_bytes(content, "little")])


class Dictionary:
    """A tier that loses some pages, says it has others that it has not, and can be held up."""

    name = "dictionary"

    def __init__(self) -> None:
        self.pages: dict[bytes, BlockContent] = {}
        self.open = Event()
        """Clear: fetches wait."""
        self.open.set()
        self.fetches = 0

    def lookup(self, digest: bytes) -> bool:
        return digest in self.pages

    def fetch(self, digest: bytes) -> BlockContent | None:
        self.fetches += 1
        assert self.open.wait(60)
        return self.pages.get(digest)

    def put(self, digest: bytes, page: BlockContent) -> None:
        self.pages[digest] = bytes(page)

    def drop(self, digest: bytes | None) -> None:
        if digest is None:
            self.pages.clear()
        else:
            self.pages.pop(digest, None)


class Unreliable(Dictionary):
    """Has every page, it says; of some it has not even a copy."""

    def lookup(self, digest: bytes) -> bool:
        return digest[0] % 4 == 0 or super().lookup(digest)

    def put(self, digest: bytes, page: BlockContent) -> None:
        if digest[0] % 4 != 1:
            super().put(digest, page)


def tiers_of(device: FakeDevice, tiers: Sequence[Tier], **transfer_options: Any) -> TieredKVOffloader:
    return TieredKVOffloader(
        tiers, FakeMover(device), Always(device.block), transfer_options=TransferOptions(**transfer_options)
    )
