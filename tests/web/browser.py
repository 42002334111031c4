"""A headless Chromium and its helpers for tests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

PATIENCE = 60.0
"""Seconds. Actions take fractions of one, but the machine may be busy with other tests."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)

T = TypeVar("T")


class Browser:
    """One window. `errors` returns the console's errors since the last call."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1440, height: int = 1000) -> None:
        """Open a page with empty storage."""
        self.resize(width, height)
        self.driver.get(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(url)

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """Wait until one element is visible."""
        return self.until(lambda: next((each for each in self.all(selector) if each.is_displayed()), None))

    def text(self, selector: str) -> str:
        """The text in the document, whatever the style makes of it. Read in one call, because the page may be redrawn
        meanwhile.
        """
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def module(self, path: str, script: str, *args: Any) -> Any:
        """Run a function body with `module` and `args`; return its result."""
        wrapped = (
            "const done = arguments[arguments.length - 1], args = [...arguments].slice(0, -1);"
            f"import('{path}').then((module) => {{ {script} }}).then(done, (error) => done('failed: ' + error))"
        )
        return self.driver.execute_async_script(wrapped, *args)

    def until(self, found: Callable[[], T | None]) -> T:
        """Wait until `found` returns a true value, and return it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if value := found():
                    return value
            except StaleElementReferenceException:
                pass  # redrawn meanwhile
            assert time.monotonic() < deadline, f"not seen in time; the page says: {self.text('main')[:1500]}"
            time.sleep(0.05)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def running_browser(profile: Path, *more_flags: str) -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, *more_flags, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    driver.set_script_timeout(PATIENCE)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
