import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# As in engine/worker/startup.py: oneDNN reads this once, in tests possibly before an engine starts.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# OpenMP reads this when PyTorch loads it. Its threads spin otherwise, which takes twenty times the processor time when
# tests share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests.made_once import keep_in

# Tiny models gain nothing from a second thread, and lose much when tests share the cores with their servers.
torch.set_num_threads(1)

# Otherwise every HTTP client, in tests and in their servers, loads all of certifi's authorities, which takes 20 ms. No
# test needs one of them: tests of TLS make their own.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("one_certificate.pem"))

# A shell's background job ignores SIGINT, and servers that tests end by Ctrl-C would inherit that. A handler that does
# nothing is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)

pytest_plugins = ["tests.tiers"]

HELD = 60.0
"""Seconds after its own timeout at which a test's process is ended, because native code does not handle the signal."""
_stderr = os.dup(sys.__stderr__.fileno()) if sys.__stderr__ else 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collection creates a million objects and hardly any garbage. Without this, the garbage collector would scan them
    during collection and in every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Variables of the tests, which have read them by now; servers that tests start would reject them.
    for name in ("QUIRE_SHARED", "QUIRE_SCHEMATHESIS_EXAMPLES"):
        os.environ.pop(name, None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


class TimedOut(BaseException):
    """A test exceeded its timeout. Not pytest's Failed: hypothesis would take that for a falsifying error and rerun the
    example to shrink it, without a timer.
    """


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    """Make pytest-timeout raise TimedOut. If the test does not react, the process ends and prints where each thread
    stands.
    """
    result = yield
    fail = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fail):

        def end(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            try:
                fail(number, frame)
            except pytest.fail.Exception as failed:
                raise TimedOut(str(failed)) from None

        signal.signal(signal.SIGALRM, end)
        faulthandler.dump_traceback_later(settings.timeout + HELD, exit=True, file=_stderr)
    return result


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_cancel_timer() -> Generator[None, Any, Any]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def folders_are_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made_once"
    folder.mkdir(exist_ok=True)
    keep_in(folder)


@pytest.fixture
def kept_rates(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A plan measures the machine once, which takes seconds, and prints that; here measured rates exist."""
    from quire.server.cli.plan.cpu_rates import machine_key

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache := tmp_path_factory.mktemp("cache")))
    (cache / "quire").mkdir()
    known = {"bandwidth": 20e9, "flops": 1e11, "at": time.time()}
    (cache / "quire" / "rates.json").write_text(json.dumps({machine_key(): known}))
