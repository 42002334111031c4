"""Connections among ranks of several machines, each to each. Who connects shows a key that the first machine has given
to all ranks of its engine."""

from __future__ import annotations

import hmac
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from quire.engine.nodes.greeting import tune
from quire.kernels.collective import RankEnded

KEY = 32
"""Bytes of the key; one more says the rank."""
_MOST_STRANGERS = 64
"""Connections that have not shown the key yet; the oldest one is closed for another."""
_LOOK_SECONDS = 0.5


def open_door(host: str) -> socket.socket:
    """Where the ranks after this one reach it: at a free port of this machine's address. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family)


def connect_all(
    door: socket.socket,
    rank: int,
    places: Sequence[tuple[str, int]],
    key: bytes,
    seconds: float,
    over: Callable[[], bool],
) -> dict[int, socket.socket]:
    """A connection to each other rank, of which `places` are the doors; closes this rank's. Raises RankEnded when some
    have not come in time, or when it is `over`."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    try:
        with door, closing(_Guests(door, set(range(rank + 1, len(places))), key, found)) as guests:
            for other in range(rank):
                found[other] = _reach(places[other], seconds, f"rank {rank} cannot reach rank {other}")
                found[other].sendall(key + bytes([rank]))
            while guests.missing:
                if over() or time.monotonic() > deadline:
                    raise TimeoutError
                guests.look()
        for each in found.values():
            tune(each)
    except OSError as error:
        for each in found.values():
            each.close()
        raise RankEnded from error
    return found


def _reach(place: tuple[str, int], seconds: float, failed: str) -> socket.socket:
    try:
        return socket.create_connection(place, seconds)
    except OSError as error:
        print(f"quire: {failed} at {place[0]}:{place[1]}: {error}", file=sys.stderr, flush=True)
        raise


class _Guests:
    """Those that connect to a rank's door: ranks, and perhaps others."""

    def __init__(self, door: socket.socket, missing: set[int], key: bytes, come: dict[int, socket.socket]) -> None:
        """`missing`: the ranks that will come, which are put into `come`."""
        self.missing, self._come = missing, come
        self._door, self._key = door, key
        self._shown: dict[socket.socket, bytes] = {}
        """What each stranger has sent."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)

    def look(self) -> None:
        for ready, _ in self._selector.select(_LOOK_SECONDS):
            if ready.fileobj is self._door:
                self._let_in()
            elif isinstance(ready.fileobj, socket.socket):
                self._read(ready.fileobj)

    def close(self) -> None:
        for stranger in list(self._shown):
            self._turn_away(stranger)
        self._selector.close()

    def _let_in(self) -> None:
        if len(self._shown) == _MOST_STRANGERS:
            self._turn_away(next(iter(self._shown)))
        stranger, _ = self._door.accept()
        stranger.setblocking(False)
        self._shown[stranger] = b""
        self._selector.register(stranger, selectors.EVENT_READ)

    def _read(self, stranger: socket.socket) -> None:
        if stranger not in self._shown:
            return  # it was turned away meanwhile
        try:
            piece = stranger.recv(KEY + 1 - len(self._shown[stranger]))
        except OSError:
            piece = b""
        self._shown[stranger] += piece
        shown = self._shown[stranger]
        if piece and len(shown) <= KEY:
            return
        if hmac.compare_digest(shown[:KEY], self._key) and shown[KEY:] and shown[KEY] in self.missing:
            self._selector.unregister(stranger)
            del self._shown[stranger]
            self.missing.remove(shown[KEY])
            self._come[shown[KEY]] = stranger
        else:
            self._turn_away(stranger)

    def _turn_away(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._shown[stranger]
        stranger.close()
