"""A real browser for tests: Chromium without a window, driven by Selenium.

Debian has it: ``apt-get install chromium chromium-driver``. A machine without the browser skips the
tests. One that has the browser and not what drives it fails them.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PHONE, DESKTOP, WIDE = (360, 740), (1280, 900), (1600, 1000)
needs_browser = [
    pytest.mark.browser,
    pytest.mark.multiproc,
    pytest.mark.skipif(not BROWSER, reason="needs chromium"),
]
"""Marks of a module of browser tests."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser that keeps what its console says."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    driver_path = shutil.which("chromedriver")
    assert driver_path, f"{BROWSER} is here and chromedriver is not: install chromium-driver"
    options = ChromeOptions()
    options.binary_location = BROWSER
    # Root, as in containers, has no sandbox; their shared memory is small.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(driver_path))
    try:
        yield driver
    finally:
        driver.quit()


def show(
    browser: Any,
    address: str,
    size: tuple[int, int] = DESKTOP,
    scheme: str = "light",
    motion: str = "no-preference",
) -> None:
    """Open an address on a screen of the given size and preferences."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)


def run_script(browser: Any, script: str) -> Any:
    return browser.execute_script(script)


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def is_as_wide_as_the_screen(browser: Any, size: tuple[int, int]) -> bool:
    """Whether nothing makes the page scroll sideways."""
    wide, shown = run_script(
        browser, "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    )
    return wide <= shown <= size[0]


def brightness(browser: Any) -> tuple[int, int]:
    """Sums of red, green and blue of the page's ground and ink."""
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    ground, ink = (sum(map(int, c[4:-1].split(","))) for c in run_script(browser, colours))
    return ground, ink


def violations(browser: Any) -> list[str]:
    """What axe finds: contrast, names, roles, order, headings and so on."""
    from axe_core_python.selenium import Axe

    found = Axe().run(browser)
    assert len(found["passes"]) > 20
    return [
        f"{rule['id']}: {rule['help']}: {node['html'][:120]} {node['any'][:1]}"
        for rule in found["violations"]
        for node in rule["nodes"][:3]
    ]
