"""Thinking and tool calls, which the embedded model does not write: a scripted engine does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import uvicorn
from selenium.webdriver.common.keys import Keys

from quire.engine.types import Request
from tests.e2e.server import free_port
from tests.server.api import make_app
from tests.server.fake import FakeEngine
from tests.texts import CHATML
from tests.web.browser import Browser

pytestmark = pytest.mark.slow

EOS = 258
CALL = b"""<think>They want *weather*.</think>Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>"""
AFTER = b"It **snows** in Bern."
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


def weather(request: Request, position: int) -> int:
    """Calls a tool, and answers once its result is there."""
    prompt = bytes(token for token in request.prompt_ids if token < 256)
    text = AFTER if b"-3 C" in prompt else CALL
    return text[position] if position < len(text) else EOS


@pytest.fixture
def url(chromium: Browser) -> Iterator[str]:
    engine = FakeEngine(weather, eos=[EOS], max_model_len=2048)
    template = CHATML + "{# tools: <tool_call> <think> #}"
    app = make_app(engine, chat_template=template, tool_call_parser="hermes", reasoning_parser="think")
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    app.state.runtime.live_view.close()
    running.should_exit = True
    thread.join(30)


def test_thinking_and_calls_are_shown_and_a_result_goes_back(browser: Browser, url: str) -> None:
    browser.open(f"{url}/")
    browser.click(".settings details details summary")
    browser.fill("#tools", TOOLS)
    browser.fill("#max_tokens", "400")
    browser.fill("#draft", "How is the weather in Bern?" + Keys.ENTER)
    browser.until(lambda: browser.all(".tool-call button"))
    assert browser.text(".reasoning p") == "They want *weather*."
    assert browser.text(".prose p").strip() == "Let me look."
    assert browser.text(".tool-name code") == "weather"
    assert browser.text(".tool-call pre") == '{\n  "city": "Bern"\n}'
    browser.click(".tool-call button")
    browser.one(".message.tool textarea").send_keys("-3 C, snow", Keys.CONTROL + Keys.ENTER)
    browser.click("#log .message:last-child [data-action=ask]")
    browser.until(lambda: len(browser.all("#log .message")) == 4 and browser.all("#log .message:last-child strong"))
    browser.until(lambda: browser.text("#log .message:last-child .prose") == "It snows in Bern.")
