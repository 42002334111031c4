"""Tiers and a block mover without a model."""

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
    """Loading always pays, however fast the machine computes."""

    def num_blocks_worth_loading(self, tiers: Sequence[str]) -> int:
        return len(tiers)


class Inline(Executor):
    """A ThreadPoolExecutor without threads: blocks are in their tiers at once, however busy the machine is."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **named))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def always(tiers: Sequence[Tier], mover: BlockMover, _: LoadCosts, *rest: Any) -> TieredKVOffloader:
    """A KV offloader that loads every block a tier has, even if computing its tokens would cost less, and that stores
    blocks at once.
    """
    return TieredKVOffloader(tiers, mover, Always(16), *rest, TransferOptions(store_threads=Inline))


def always_late(tiers: Sequence[Tier], mover: BlockMover, _: LoadCosts, *rest: Any) -> TieredKVOffloader:
    """Like `always`, but stores in threads."""
    return TieredKVOffloader(tiers, mover, Always(16), *rest)


class FakeMover:
    """A BlockMover for a FakeDevice; 8 bytes stand for the content of a block."""

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
    """A tier in a dictionary whose fetches can be made to wait."""

    name = "dictionary"

    def __init__(self) -> None:
        self.pages: dict[bytes, BlockContent] = {}
        self.open = Event()
        """If cleared, fetches wait."""
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
    """Claims to have blocks that it lacks, and loses some that it is given."""

    def lookup(self, digest: bytes) -> bool:
        return digest[0] % 4 == 0 or super().lookup(digest)

    def put(self, digest: bytes, page: BlockContent) -> None:
        if digest[0] % 4 != 1:
            super().put(digest, page)


def tiers_of(device: FakeDevice, tiers: Sequence[Tier], **transfer_options: Any) -> TieredKVOffloader:
    return TieredKVOffloader(
        tiers, FakeMover(device), Always(device.block), transfer_options=TransferOptions(**transfer_options)
    )
