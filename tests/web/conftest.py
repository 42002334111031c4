"""A browser for all tests here, and servers for it to visit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.engine.common.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.tiny_models import save_tiny_model
from tests.web.browser import CHROMEDRIVER, CHROMIUM, Browser, running_browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("no chromium and chromedriver here (Debian: apt install chromium chromium-driver)")
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Fails a test if its page logged errors; a test that expects errors reads them itself."""
    chromium.errors()
    yield chromium
    complaints = chromium.errors()
    chromium.driver.get("about:blank")
    assert complaints == []


@pytest.fixture(scope="session")
def server(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with a small block pool, so that few requests fill a good part of the map."""
    log = tmp_path_factory.mktemp("web") / "server.log"
    running = Server(log, "--num-kv-blocks", "600", "--threads", "1")
    yield running
    assert running.stop() == 0, log.read_text()


@pytest.fixture(scope="session")
def patient(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of slow steps and a long context, whose streams outlast every check on any machine."""
    folder = tmp_path_factory.mktemp("patient")
    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    context = {"max_position_embeddings": 8192, "vocab_size": 4096}
    save_tiny_model(folder, "llama", dtype=torch.bfloat16, **shape, **context)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, folder)
    template = Path(DEMO_MODEL) / "training" / "template.jinja"
    options = ("--chat-template", str(template), "--num-kv-blocks", "600", "--threads", "1")
    running = Server(folder / "server.log", str(folder), *options)
    yield running
    assert running.stop() == 0, running.log.read_text()
