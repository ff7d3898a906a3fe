"""Speed of the page in Chromium, on the loopback: `python benchmarks/page.py`.

First paint; frames while 30 tokens a second arrive; a text of 1,000 tokens with branches; 100 runs
of 10,000 steps each, all of them drawn. `--pictures FOLDER` also writes pictures of all views, from
which those of the docs are taken.
Also needs: pip install -e ".[test]", and Chromium with its driver (Debian: chromium and
chromium-driver)
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromium
from common import print_machine, print_table
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
TOKENS_PER_SECOND = 30
RUNS, STEPS = 100, 10_000
LOADS = 5
# A frame of 60 a second that came this much later than it should was not drawn in time.
LATE_MS = 1.5 * 1000 / 60


@contextlib.contextmanager
def serving(folder: Path, pause: list[float]) -> Iterator[str]:
    """The address of a server of the newest run in `folder`, in this process. It waits `pause[0]`
    seconds for each token."""
    import uvicorn

    from gptlite.runs.load import load
    from gptlite.serving.app import make_app
    from gptlite.serving.models import Models, serve_run
    from gptlite.serving.server import open_socket, server_config

    os.chdir(folder)
    models = Models(serve_run(load("page"), "page", max_rows=4, max_waiting=16))
    batch = models.main.engine._batch
    step = batch.step

    def slow_step() -> list[Any]:
        made = step()
        time.sleep(pause[0] * max((len(ids) for _, ids, _ in made), default=0))
        return made

    batch.step = slow_step
    server = uvicorn.Server(server_config(make_app(models, hosts=None)))
    listening = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        models.close()


def make_runs(folder: Path) -> None:
    """A trained run, and many with curves only."""
    choose = random.Random(0)
    config = (folder / "runs" / "page" / "config.json").read_bytes()
    for number in range(RUNS - 1):
        run = folder / "runs" / f"sweep-{number:02d}"
        run.mkdir()
        (run / "config.json").write_bytes(config)
        (run / "tokenizer.json").touch()
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, STEPS + 1):
                loss = 1.5 + 3 * math.exp(-step / 500) + number / 200 + choose.gauss(0, 0.03)
                record = {"step": step, "train_loss": loss, "seconds": step / 10}
                if step % 500 == 0:
                    record["val_loss"] = loss + 0.05
                file.write(json.dumps(record) + "\n")
        began = time.time() - 3600 * (RUNS - number)  # before the trained one
        os.utime(run / "tokenizer.json", (began, began))


class Browser:
    """The page in Chromium."""

    def __init__(self, address: str):
        self.driver = chromium.start()
        self.driver.set_script_timeout(300)
        self.address = address
        self.run = self.driver.execute_script

    def open(self, view: str, **window: Any) -> None:
        chromium.show(self.driver, f"{self.address}#{view}", **window)
        self.wait("document.getElementById('model').textContent")

    def wait(self, condition: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return {condition}"):
            if time.monotonic() > end:
                text = self.run("return document.body.innerText.slice(0, 2000)")
                sys.exit(f"{condition} did not come true: {text}")
            time.sleep(0.05)

    def generate(self, prompt: str, count: int) -> None:
        self.run(
            "const [prompt, count] = arguments;"
            "document.getElementById('prompt').value = prompt;"
            "document.getElementById('max_tokens').value = count;"
            "document.getElementById('seed').value = 1;"
            "document.getElementById('start').click()",
            prompt,
            count,
        )
        self.wait("document.getElementById('stop').disabled")

    def milliseconds(self, action: str) -> float:
        """From an action until the frame after it is drawn."""
        return self.driver.execute_async_script(
            "const done = arguments[0]; const begin = performance.now();"
            f"{action};"
            "const end = () => done(performance.now() - begin);"
            "requestAnimationFrame(() => requestAnimationFrame(end))"
        )

    def picture(self, path: Path) -> None:
        content = io.BytesIO(self.driver.get_screenshot_as_png())
        Image.open(content).convert("RGB").quantize(128).save(path, optimize=True)


def repeated(measure: Callable[[], float], count: int = LOADS) -> str:
    found = [measure() for _ in range(count)]
    return f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"


def first_paint(browser: Browser) -> float:
    browser.open("generate")
    entry = "performance.getEntriesByName('first-contentful-paint')[0]"
    browser.wait(entry)
    return float(browser.run(f"return {entry}.startTime"))


def frames(browser: Browser, pause: list[float]) -> tuple[str, str]:
    """While tokens arrive: frames that were late, and the longest."""
    browser.open("generate")
    browser.run(
        "window.frames_ = []; let last = performance.now();"
        "const next = (now) => {"
        "  frames_.push(now - last); last = now; requestAnimationFrame(next);"
        "};"
        "requestAnimationFrame(next)"
    )
    pause[0] = 1 / TOKENS_PER_SECOND
    browser.generate("\n", 300)
    pause[0] = 0.0
    found = browser.run("return frames_.slice(5)")
    late = sum(frame > LATE_MS for frame in found)
    return f"{late} of {len(found)}", f"{max(found):,.0f}"


def curves(browser: Browser) -> str:
    """Until those of all runs are read and drawn."""
    browser.open("runs")
    browser.wait(f"document.querySelectorAll('#runs-table tbody input').length === {RUNS}")
    begin = time.perf_counter()
    browser.run("document.getElementById('all-runs').click()")
    browser.wait(f"document.getElementById('curves').dataset.curves >= {2 * RUNS}")
    return f"{time.perf_counter() - begin:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="a folder")
    parser.add_argument("--train", default="", help="options of train.py for the model")
    arguments = parser.parse_args()
    pictures = None if arguments.pictures is None else arguments.pictures.resolve()
    print_machine()
    with tempfile.TemporaryDirectory() as name:
        folder, pause = Path(name), [0.0]
        train(folder, arguments.train)
        make_runs(folder)
        with serving(folder, pause) as address:
            browser = Browser(address)
            try:
                measure(browser, pause)
                if pictures is not None:
                    take_pictures(browser, pictures)
            finally:
                browser.driver.quit()


def train(folder: Path, options: str) -> None:
    import shlex
    import subprocess

    words = [sys.executable, str(ROOT / "train.py"), "--run", "page", *shlex.split(options)]
    subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def measure(browser: Browser, pause: list[float]) -> None:
    rows = [["first paint, ms", repeated(lambda: first_paint(browser))]]
    late, longest = frames(browser, pause)
    rows.append([f"late frames at {TOKENS_PER_SECOND} tokens/s", late])
    rows.append(["longest frame, ms", longest])
    browser.open("generate")
    browser.generate("\n", 1000)
    for place in (100, 400, 700):
        browser.run(f"document.getElementById('text').children[{place}].click()")
        browser.run("document.querySelector('#rivals li button:not([aria-current])').click()")
        browser.wait("document.getElementById('stop').disabled")
    count = browser.run("return document.getElementById('text').children.length")
    selecting = "document.getElementById('text').children[Math.floor(Math.random() * 1000)].click()"
    rows.append(
        [f"a token selected, of {count:,}, ms", repeated(lambda: browser.milliseconds(selecting))]
    )
    branch = "const all = document.querySelectorAll('#branches button');"
    switching = f"{branch} all[Math.floor(Math.random() * all.length)].click()"
    rows.append(["another branch, ms", repeated(lambda: browser.milliseconds(switching))])
    for again in ("", ", when the page is loaded again"):
        rows.append([f"curves of {RUNS} runs of {STEPS:,} steps, s{again}", curves(browser)])
    axis = "document.getElementById('log-loss').click()"
    rows.append(["another axis for all of them, ms", repeated(lambda: browser.milliseconds(axis))])
    print_table(["", ""], rows)


def take_pictures(browser: Browser, folder: Path) -> None:
    """Of every view, in light and dark, wide and narrow."""
    folder.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        for width, height in ((1200, 860), (360, 800)):
            name = f"{'dark' if dark else 'light'}-{width}"
            browser.open("generate", width=width, height=height, dark=dark)
            browser.generate("ROMEO:\n", 300)
            browser.run("document.getElementById('text').children[60].click()")
            browser.run("document.querySelector('#rivals li button:not([aria-current])').click()")
            browser.wait("document.getElementById('stop').disabled")
            browser.picture(folder / f"generate-{name}.png")
            browser.run("document.getElementById('tab-look').click()")
            browser.wait("document.querySelector('#lens tbody tr')")
            browser.run("[...document.querySelectorAll('.layer button')].at(-1).click()")
            browser.picture(folder / f"look-{name}.png")
            browser.run("document.getElementById('tab-runs').click()")
            browser.wait("document.getElementById('curves').dataset.curves > 0")
            browser.picture(folder / f"runs-{name}.png")


if __name__ == "__main__":
    main()
