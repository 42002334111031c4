"""Accessibility of both views: axe-core finds no violations, nothing overflows, the keyboard reaches every control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.web.browser import Browser
from tests.web.test_dashboard import streams

pytestmark = pytest.mark.slow

AXE = Path(__file__).with_name("axe.min.js")
"""axe-core 4.14.1 of Deque Systems, under the Mozilla Public License 2.0; only for tests."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page: Browser) -> list[Any]:
    # Injected over the protocol, because the page's content security policy blocks scripts.
    page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
    axe_violations = page.driver.execute_async_script(
        "const done = arguments[1]; axe.run(document, {runOnly: arguments[0]}).then((found) => done("
        "found.violations.map((each) => [each.id, each.help, each.nodes.map((node) => node.html.slice(0, 160)"
        " + ' ' + (node.any[0]?.message ?? ''))])), (error) => done([String(error)]))",
        RULES,
    )
    return list(axe_violations)


def overflowing(page: Browser, width: int) -> list[str]:
    """Elements beyond the window's right edge. The page clips its overflow, so its own width does not show it."""
    script = (
        "return [...document.querySelectorAll('.sheet, .composer, .bar, .masthead > *')].filter((each) =>"
        "each.getBoundingClientRect().right > arguments[0] + 0.5).map((each) => each.outerHTML.slice(0, 80))"
    )
    return list(page.run(script, width))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_both_views_pass_axe_and_fit_width(browser: Browser, patient: Server, theme: str, width: int) -> None:
    browser.open(f"{patient.url}/", width, 900)
    browser.run(
        "const select = document.getElementById('theme'); select.value = arguments[0];"
        "select.dispatchEvent(new Event('change'))",
        theme,
    )
    assert browser.run("return getComputedStyle(document.documentElement).colorScheme") == theme
    assert violations(browser) == []
    if width < 500:
        browser.click("#settings-button")
        assert violations(browser) == []
    browser.click("#logprobs")
    browser.fill("#max_tokens", "30")
    if width < 500:
        browser.click("#settings-dialog [data-close]")
    browser.fill("#draft", "Tell me a story about a fox." + Keys.ENTER)
    browser.until(lambda: "tokens" in browser.text("#log .message:last-child .note") and browser.one("#send"))
    assert violations(browser) == []
    assert overflowing(browser, width) == []
    with streams(patient, 3):
        browser.run("location.hash = '#/engine'")
        browser.until(lambda: len(browser.all("#requests tbody tr")) == 3)
        browser.run("document.querySelector('#requests tbody tr').click()")
        browser.until(lambda: browser.all("#table li") and browser.all(".memory-bar"))
        assert violations(browser) == []
        assert overflowing(browser, width) == []
    browser.until(lambda: "has ended" in browser.text("#table-note"))
    assert all("404" in error for error in browser.errors()), "it may end after it was listed"
    browser.until(lambda: len(browser.all("#answers tbody tr")) >= 4)
    heads = [each.get_property("textContent") for each in browser.all("#answers thead th") if each.is_displayed()]
    assert heads[:2] == ["Request", "Came at"]
    assert violations(browser) == []
    assert overflowing(browser, width) == []
    browser.click("#key-button")
    assert violations(browser) == []


def test_system_theme_applies_until_user_chooses_theme(browser: Browser, server: Server) -> None:
    sheet = "return getComputedStyle(document.querySelector('.masthead')).backgroundColor"
    backgrounds = set()
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.open(f"{server.url}/")
        backgrounds.add(browser.run(sheet))
    assert len(backgrounds) == 2
    browser.run("const s = document.getElementById('theme'); s.value = 'light'; s.dispatchEvent(new Event('change'))")
    light = browser.run(sheet)
    browser.driver.refresh()
    assert browser.run(sheet) == light
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_every_control_is_reached_by_tab_key(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    browser.until(lambda: browser.run("return document.activeElement.id") == "draft")
    browser.run("document.querySelector('.skip').focus()")
    focused = "const one = document.activeElement; return one.id || one.className || one.textContent.trim()"
    reached = [browser.run(focused)]
    for _ in range(40):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()  # send_keys of a file field takes file names
        reached.append(browser.run(focused))
    expected = ["skip", "brand", "to-playground", "to-dashboard", "key-button", "theme", "talks-search", "talks-import"]
    expected += ["clear", "as-curl", "attach", "draft", "send"]
    assert [each for each in reached if each in expected][: len(expected)] == expected
    assert {"preset", "model", "temperature", "logprobs"} <= set(reached)
