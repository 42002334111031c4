"""Visible parts of the page on a phone and in a low window (issue 58, D 14)."""

from __future__ import annotations

import pytest

from tests.e2e.server import Server
from tests.web.browser import Browser
from tests.web.test_dashboard import streams

pytestmark = pytest.mark.slow

SCROLLED = """return [...document.querySelectorAll('main *')].filter((each) => each.getClientRects().length
  && /auto|scroll/.test(getComputedStyle(each).overflowY) && each.scrollHeight > each.clientHeight + 1
  && each.tagName !== 'TEXTAREA').map((each) => each.id || each.className)"""
FITS = "return document.documentElement.scrollHeight <= innerHeight"
ONE_ROW = "return document.querySelector('.tools').getBoundingClientRect().top < 20"


def test_blank_page_fits_phone_with_one_row_toolbar(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/", 390, 844)
    browser.one("#draft")
    assert browser.run(ONE_ROW)
    assert browser.run(FITS)


def test_stylesheets_use_dvh_and_no_100vh(browser: Browser, server: Server) -> None:
    """100vh is the height of a phone's window while its toolbars are hidden; dvh is the current height."""
    browser.open(f"{server.url}/")
    rules = browser.run("return [...document.styleSheets].flatMap((each) => [...each.cssRules]).map((e) => e.cssText)")
    assert any("dvh" in rule for rule in rules)
    assert [rule for rule in rules if " 100vh" in rule or "(100vh" in rule] == []


def test_only_page_itself_scrolls_in_low_window(browser: Browser, patient: Server) -> None:
    browser.open(f"{patient.url}/", 1280, 650)
    browser.one("#draft")
    assert browser.run(SCROLLED) == []
    browser.click("#settings-button")
    assert browser.one("#settings-dialog #temperature")
    browser.click("#settings-dialog [data-close]")
    with streams(patient, 20):
        browser.run("location.hash = '#/engine'")
        browser.until(lambda: len(browser.all("#requests tbody tr")) == 20)
        assert browser.run(SCROLLED) == []


def test_cancel_button_is_visible_when_request_row_is_wide(browser: Browser, patient: Server) -> None:
    browser.open(f"{patient.url}/#/engine", 390, 844)
    with streams(patient, 1):
        browser.until(lambda: browser.all("#requests tbody .danger"))
        browser.run("document.querySelector('#requests .phase').textContent = 'preempted, and more than a phone shows'")
        edges = "return [...document.querySelectorAll('#requests .danger, .stack .scroller')].slice(0, 2).map((each) =>"
        scroller, cancel = browser.run(f"{edges} each.getBoundingClientRect().right)")
        assert cancel <= scroller
