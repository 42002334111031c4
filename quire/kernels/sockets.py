"""What ranks on CPUs that share no memory compute together over: a connection from each to each, with as much of the
interface of torch.distributed's ProcessGroup as is used (distributed.py).

Its own one for CPUs, gloo, hands each call from thread to thread. Between two processes of a busy machine of two cores
it takes 330 microseconds in the median to gather 2 to 8 KB, and 8 ms for 1.2 MB, where this takes 150 and 2.6 ms. Its
`send` and `recv` now and then take 5 ms for 2 KB.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch import Tensor, uint8

_PIECE = 1 << 16
"""Bytes that a connection takes while its other end reads nothing: all send such a piece before they read, so none may
have to wait for a reader."""
_KEY = 16
"""Bytes of what a rank wants to see of who connects, which it says in the store; one more says the rank."""
_MEET_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_GREETING_SECONDS = 1.0


class SocketGroup:
    """The ranks as one of them sees them. They meet at the first call. Each call has been done when it returns, and
    raises OSError where another rank has ended, or where `abort` was called by another thread."""

    def __init__(self, store: dist.Store, rank: int, count: int, address: str) -> None:
        """`address`: this machine's, at which the others reach it; their places are told in the `store`."""
        self._store, self._rank, self._count, self._address = store, rank, count, address
        self._peers: dict[int, socket.socket] = {}
        self._over = threading.Event()

    def allgather_base(self, out: Tensor, x: Tensor) -> Done:
        """out = all ranks' x, contiguous, in their order."""
        return self._swap([_bytes(x.flatten())] * self._count, out)

    _allgather_base = allgather_base
    """PyTorch's name."""

    def alltoall_base(self, out: Tensor, x: Tensor, taken: Sequence[int], given: Sequence[int]) -> Done:
        """out's part r = rank r's part for this one of x, both contiguous and of equal parts (taken, given: [])."""
        assert not taken
        assert not given
        return self._swap([_bytes(part) for part in x.view(self._count, -1)], out)

    def broadcast(self, tensors: Sequence[Tensor], options: object = None) -> Done:
        """From the first rank."""
        self._meet()
        (x,) = tensors
        if self._rank:
            _fill(self._peers[0], _bytes(x.flatten()))
        else:
            for peer in self._peers.values():
                peer.sendall(_bytes(x.flatten()))
        return Done()

    def allreduce(self, tensors: Sequence[Tensor]) -> Done:
        """Each number is added in the order of the ranks."""
        (x,) = tensors
        parts = x.new_empty((self._count, *x.shape))
        self.allgather_base(parts, x)
        x.copy_(sum(parts[1:], start=parts[0]))
        return Done()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Done:
        """To that rank, which receives in the order in which this one sends; contiguous."""
        self._meet()
        (x,) = tensors
        self._peers[rank].sendall(_bytes(x.flatten()))
        return Done()

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Done:
        """Fill a tensor, which is contiguous, with what that rank sends."""
        self._meet()
        (x,) = tensors
        _fill(self._peers[rank], _bytes(x.flatten()))
        return Done()

    def abort(self) -> None:
        self._over.set()
        for peer in list(self._peers.values()):
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # which wakes those that wait

    def _swap(self, given: Sequence[memoryview], out: Tensor) -> Done:
        """Give each rank one of these, of equal lengths, and fill out with what they give, in their order."""
        self._meet()
        parts = [_bytes(part) for part in out.view(self._count, -1)]
        parts[self._rank][:] = given[self._rank]
        for at in range(0, len(given[self._rank]), _PIECE):
            for rank, peer in self._peers.items():
                peer.sendall(given[rank][at : at + _PIECE])
            for rank, peer in self._peers.items():
                _fill(peer, parts[rank][at : at + _PIECE])
        return Done()

    def _meet(self) -> None:
        """Connect to the ranks before this one, and let those after it connect."""
        if len(self._peers) == self._count - 1:
            return
        deadline = time.monotonic() + _MEET_SECONDS
        family, *_, place = socket.getaddrinfo(self._address, 0, type=socket.SOCK_STREAM)[0]
        found: dict[int, socket.socket] = {}
        with socket.create_server(place[:2], family=family) as door:
            door.settimeout(_LOOK_SECONDS)
            key, (host, port, *_) = secrets.token_bytes(_KEY), door.getsockname()
            self._store.set(_place_of(self._rank), f"{host} {port} {key.hex()}")
            while len(found) < self._count - 1:
                if self._over.is_set() or time.monotonic() > deadline:
                    raise TimeoutError("not all ranks have come")
                self._reach(found)
                self._let_in(door, key, found)
        for peer in found.values():
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _PIECE)
        weakref.finalize(self, _close, list(found.values()))
        self._peers = dict(sorted(found.items()))
        if self._over.is_set():  # since the last look
            raise ConnectionAbortedError

    def _reach(self, found: dict[int, socket.socket]) -> None:
        for rank in set(range(self._rank)) - found.keys():
            if self._store.check([_place_of(rank)]):
                host, port, key = self._store.get(_place_of(rank)).decode().split()
                found[rank] = socket.create_connection((host, int(port)), _MEET_SECONDS)
                found[rank].sendall(bytes.fromhex(key) + bytes([self._rank]))

    def _let_in(self, door: socket.socket, key: bytes, found: dict[int, socket.socket]) -> None:
        """Whoever does not show the key is turned away."""
        with suppress(TimeoutError):
            guest, _ = door.accept()
            guest.settimeout(_GREETING_SECONDS)
            said = bytearray(_KEY + 1)
            try:
                _fill(guest, memoryview(said))
            except OSError:
                guest.close()
                return
            if secrets.compare_digest(said[:_KEY], key) and self._rank < said[_KEY] < self._count:
                found[said[_KEY]] = guest
            else:
                guest.close()


class Done:
    """A dist.Work that is done."""

    def wait(self) -> bool:
        return True


def _place_of(rank: int) -> str:
    return f"sums/{rank}"


def _bytes(x: Tensor) -> memoryview:
    return x.view(uint8).numpy().data


def _fill(peer: socket.socket, into: memoryview) -> None:
    """Raises OSError."""
    while into:
        count = peer.recv_into(into)
        if not count:
            raise ConnectionResetError("another rank has ended")
        into = into[count:]


def _close(connections: Iterable[socket.socket]) -> None:
    for each in connections:
        each.close()
