"""Small bodies must not block the event loop. A body of 397 bytes, encoded three times, held 16 MB of empty deflate
blocks: decoding yielded nothing, so no other request ran for 4.7 s (issue 56, hostile reading).
"""

import asyncio
import gzip
import threading
from collections.abc import Iterator

import pytest

from quire.engine.schemas.object_closing import close_objects
from quire.server.access.content_encoding import BodyDecoder, iter_parts_in_thread

EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"
END = b"\x03\x00" + 8 * b"\x00"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_body_decoder_yields_for_empty_deflate_blocks(layers: int) -> None:
    blocks = 1 << 18
    body = HEAD + EMPTY_BLOCK * blocks + END
    for _ in range(layers - 1):
        body = gzip.compress(body)
    parts = list(BodyDecoder(["gzip"] * layers, 1 << 24).decode_chunk(body))
    assert b"".join(parts) == b""
    assert len(parts) >= blocks * len(EMPTY_BLOCK) >> 14


async def test_event_loop_runs_while_body_is_decoded_in_thread() -> None:
    turn = threading.Event()

    def parts() -> Iterator[bytes]:
        yield b"a"
        assert turn.wait(10)
        yield b""
        yield b"b"

    asyncio.get_running_loop().call_soon(turn.set)
    assert [part async for part in iter_parts_in_thread(parts())] == [b"a", b"b"]


async def test_error_in_decoding_thread_reaches_caller() -> None:
    def parts() -> Iterator[bytes]:
        yield b"a"
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        [part async for part in iter_parts_in_thread(parts())]


def test_close_objects_bounds_work_for_many_all_of_members() -> None:
    """220 KB of such members took 19 s, of the event loop if a grammar had to be relaxed."""
    members = [{"properties": {f"p{number}": {}}, "additionalProperties": {"type": "string"}} for number in range(60)]
    schema = {"type": "object", "properties": {"a": {"allOf": members}}}
    assert close_objects(schema) == (schema, ("",))
    schema = {"type": "object", "properties": {"a": {"allOf": members[:10]}}}
    assert not close_objects(schema).open_objects
