"""Chromium without a window, for what is measured and tested in a browser.

Also needs: pip install -e ".[test]", and Chromium with its driver (Debian: chromium and
chromium-driver)
"""

import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PROGRAMS = shutil.which("chromium"), shutil.which("chromedriver")


def start() -> webdriver.Chrome:
    """A browser that keeps what its console says.

    **Raises:** `SystemExit` if it is not installed.
    """
    chromium, driver = PROGRAMS
    if chromium is None or driver is None:
        raise SystemExit("Chromium or its driver is missing: install chromium and chromium-driver.")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    words = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage")
    for word in (*words, "hide-scrollbars"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def show(
    driver: webdriver.Chrome,
    address: str,
    *,
    width: int = 1200,
    height: int = 900,
    dark: bool = False,
) -> None:
    """Load a page anew in a window of that size (pixels)."""
    media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get("about:blank")
    driver.get(address)
