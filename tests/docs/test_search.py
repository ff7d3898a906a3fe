"""The site, built and read as files, without a server and without a network."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

webdriver = pytest.importorskip("selenium.webdriver")
import chromium  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

ZENSICAL = shutil.which("zensical", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(ZENSICAL is None, reason="needs zensical"),
    pytest.mark.skipif(None in chromium.PROGRAMS, reason="needs chromium and chromium-driver"),
]


@pytest.fixture(scope="module")
def site() -> Path:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", ".ci/site"], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return ROOT / "site"


def test_the_tour_is_a_page_with_its_results_and_formulas(site):
    page = (site / "examples" / "tour.html").read_text("utf-8")
    pictures = re.findall(r'<img [^>]*src="([^"]+)"', page)
    assert sum((site / "examples" / picture).is_file() for picture in pictures) == 3
    assert "First Citizen:" in page
    assert "<math" in page
    assert "$" not in re.sub(r"(?s)<pre>.*?</pre>|<script.*?</script>", "", page)


def test_the_reference_shows_the_arguments_of_what_it_names(site):
    """In a signature, or as fields; and how a module is called."""
    seen = 0
    for page in sorted((site / "docs" / "reference").glob("*.html")):
        text = re.sub(
            r'(?s)<details class="mkdocstrings-source">.*?</details>', "", page.read_text()
        )
        for name, section in re.findall(r'(?s)<h2 id="(gptlite\.[^"]+)"(.*?)(?=<h2 |\Z)', text):
            module, _, last = name.rpartition(".")
            thing = getattr(importlib.import_module(module), last)
            is_public = module in ("gptlite", "gptlite.nn") and callable(thing)
            if not is_public or name == "gptlite.UserError":
                continue
            seen += 1
            plain = re.sub("<[^>]+>", "", section)
            for argument in inspect.signature(thing).parameters:
                assert re.search(rf"\b{argument}(: |,|=|\n)", plain), (name, argument)
            if inspect.isclass(thing) and "__call__" in vars(thing):
                assert f'id="{name}.__call__"' in section
    assert seen > 70


def test_the_site_is_searched_offline(site):
    driver = chromium.start()
    try:
        driver.get((site / "docs" / "faq.html").as_uri())
        typed = webdriver.ActionChains(driver)
        typed.key_down(Keys.CONTROL).send_keys("k").key_up(Keys.CONTROL).perform()
        for letter in "rotaryoptions":
            time.sleep(0.2)  # what is typed is searched letter by letter
            webdriver.ActionChains(driver).send_keys(letter).perform()
        for _ in range(50):  # until something is found, which is shown in a closed tree
            time.sleep(0.2)
            webdriver.ActionChains(driver).send_keys(Keys.ENTER).perform()
            if "#gptlite.nn.RotaryOptions" in driver.current_url:
                break
        else:
            pytest.fail("nothing was found")
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    finally:
        driver.quit()
