"""The matrix tile (AMX) instructions, encoded by hand from Intel's manual. If the processor has none, trap.cpp executes
them and is what is tested; otherwise the processor is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels import trapped

pytestmark = [trapped.needs_tiles, pytest.mark.usefixtures("trap")]

CONFIGURE = "c4e2784907"  # ldtilecfg (%rdi)
TELL = "c4c2794900"  # sttilecfg (%r8)
ZERO = "c4e27b49c0"  # tilezero %tmm0
LOAD = "c4e27b4b240ec4e2794b2c0a"  # tileloadd (%rsi,%rcx), %tmm4; tileloaddt1 (%rdx,%rcx), %tmm5
DOT, DOT_BYTES = "c4e2525cc4", "c4e2535ec4"  # tdpbf16ps, tdpbssd %tmm5, %tmm4, %tmm0
STORE = "c4c27a4b0408"  # tilestored %tmm0, (%r8,%rcx)
RELEASE, RETURN = "c4e27849c0", "c3"


@pytest.fixture(scope="module")
def trap() -> ctypes.CDLL | None:
    return trapped.trap()


def function(*code: str) -> Callable[..., None]:
    """void f(shapes, x, weight, stride, sums)"""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(bytes.fromhex("".join([*code, RETURN])))
    pointer = ctypes.c_void_p
    made = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, ctypes.c_long, pointer)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    called = made(address)

    def call(shapes: bytes, x: Tensor | None = None, weight: Tensor | None = None, sums: Tensor | None = None) -> None:
        config = [None if each is None else each.data_ptr() for each in (x, weight)]
        called(shapes, *config, 64, None if sums is None else sums.data_ptr())
        assert memory  # keeps the code alive during the call

    return call


def shapes(rows: Sequence[int], columns: Sequence[int], *, palette: int = 1, reserved: int = 0) -> bytes:
    """A tile configuration: rows and bytes per row of tiles 0, 4 and 5."""
    all_rows, all_bytes = [0] * 16, [0] * 16
    for tile, r, c in zip((0, 4, 5), rows, columns, strict=True):
        all_rows[tile], all_bytes[tile] = r, c
    return struct.pack("<BB13xB16H16B", palette, 0, reserved, *all_bytes, *all_rows)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_tdpbf16ps_multiplies_bfloat16_tiles(rows: int, generator: torch.Generator) -> None:
    """Small integers have exact sums. This is the quickest test in which the processor traps."""
    x = torch.randint(-9, 10, (rows, 32), generator=generator).bfloat16()
    weight = torch.randint(-9, 10, (32, 16), generator=generator).bfloat16()
    pairs = weight.view(16, 2, 16).transpose(1, 2).contiguous()  # even and odd inputs side by side
    sums = torch.full((16, 16), 7.0)
    multiply = function(CONFIGURE, ZERO, LOAD, DOT, DOT, STORE, RELEASE)
    multiply(shapes((rows, rows, 16), (64, 64, 64)), x, pairs, sums)
    assert torch.equal(sums[:rows], 2 * (x.float() @ weight.float()))
    assert (sums[rows:] == 7.0).all(), "rows behind the tile's are not written"


@pytest.mark.parametrize(("rows", "inner"), [(16, 64), (3, 16), (9, 48)])
def test_tdpbssd_multiplies_int8_tiles(rows: int, inner: int, generator: torch.Generator) -> None:
    x = torch.randint(-128, 128, (rows, inner), generator=generator, dtype=torch.int8)
    weight = torch.randint(-128, 128, (inner, 16), generator=generator, dtype=torch.int8)
    lines = torch.zeros((rows, 64), dtype=torch.int8)
    lines[:, :inner] = x
    words = weight.view(inner // 4, 4, 16).transpose(1, 2).contiguous()
    sums = torch.zeros((rows, 16), dtype=torch.int32)
    multiply = function(CONFIGURE, ZERO, LOAD, DOT_BYTES, STORE, RELEASE)
    multiply(shapes((rows, rows, inner // 4), (64, inner, 64)), lines, words, sums)
    assert torch.equal(sums, (x.long() @ weight.long()).int())


def test_sttilecfg_stores_tile_shapes(generator: torch.Generator) -> None:
    config, stored = shapes((3, 3, 16), (64, 64, 64)), torch.full((64,), 9, dtype=torch.uint8)
    function(CONFIGURE, TELL, RELEASE)(config, sums=stored)
    assert bytes(stored.tolist()) == config
    function(TELL)(config, sums=stored)
    assert not stored.any(), "none are left"


FORBIDDEN = {
    "shapes": ([ZERO], shapes((1, 1, 16), (64, 64, 64)), "this thread's tiles have no shapes"),
    "a shape": ([CONFIGURE, ZERO], shapes((0, 1, 16), (0, 64, 64)), "this tile has no shape"),
    "other rows": ([CONFIGURE, DOT], shapes((2, 3, 16), (64, 64, 64)), "other numbers of rows"),
    "other inputs": ([CONFIGURE, DOT], shapes((2, 2, 15), (64, 64, 64)), "as many words"),
    "other outputs": ([CONFIGURE, DOT], shapes((2, 2, 16), (32, 64, 64)), "other numbers of columns"),
    "one tile twice": ([CONFIGURE, "c4e27a5cc0"], shapes((2, 2, 16), (64, 64, 64)), "two operands are one tile"),
    "released": ([CONFIGURE, RELEASE, ZERO], shapes((1, 1, 16), (64, 64, 64)), "this thread's tiles have no shapes"),
}
MALFORMED = {
    "palette": shapes((1, 1, 16), (64, 64, 64), palette=2),
    "reserved": shapes((1, 1, 16), (64, 64, 64), reserved=1),
    "rows": shapes((17, 1, 16), (64, 64, 64)),
    "columns": shapes((1, 1, 16), (68, 64, 64)),
    "half": shapes((1, 1, 0), (64, 64, 64)),
}


def end_of(*calls: Callable[[], object]) -> int:
    """The exit code of a forked process that makes these calls."""
    if (child := os.fork()) == 0:
        for call in calls:
            call()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("what", FORBIDDEN)
def test_invalid_tile_instruction_raises_sigill(
    what: str, trap: ctypes.CDLL | None, capfd: pytest.CaptureFixture[str]
) -> None:
    code, config, why = FORBIDDEN[what]
    assert end_of(lambda: function(*code)(config)) == -signal.SIGILL
    assert trap is None or why in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_tile_config_raises_sigsegv(what: str) -> None:
    assert end_of(lambda: function(CONFIGURE)(MALFORMED[what])) == -signal.SIGSEGV


@pytest.mark.slow
def test_tile_config_is_per_thread() -> None:
    """A thread that starts later is no proof: Linux copies its creator's configuration (seen on an Intel processor)."""
    config = shapes((1, 1, 16), (64, 64, 64))
    configured = threading.Event()
    zero = function(ZERO)

    def zero_in_earlier_thread() -> None:
        def wait_and_zero() -> None:
            configured.wait()
            zero(config)

        thread = threading.Thread(target=wait_and_zero)
        thread.start()
        function(CONFIGURE)(config)
        configured.set()
        thread.join()

    assert end_of(lambda: function(CONFIGURE, ZERO)(config)) == 0
    assert end_of(zero_in_earlier_thread) == -signal.SIGILL
