"""The page in a real browser, without a window."""

import contextlib
import json
import re
import shutil
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, TINY, run_script, tiny_run
from support.ledgers import HOSTILE, write_ledger
from support.servers import NAME, TOKENIZER, served_model, serving

from gptlite.inspect.attention_maps import attention_maps
from gptlite.inspect.logit_lens import logit_lens
from gptlite.runs.folder import RunFolder
from gptlite.text.tokenizer import CharTokenizer

webdriver = pytest.importorskip("selenium.webdriver")
import chromium  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(None in chromium.PROGRAMS, reason="needs chromium and chromium-driver"),
]


class Page:
    """The page in a browser."""

    def __init__(self, driver):
        self.driver = driver
        self.run = driver.execute_script

    def open(self, address, view="generate", **window):
        """A new page."""
        chromium.show(self.driver, f"http://127.0.0.1:{address.port}/#{view}", **window)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def wait(self, condition, seconds=60):
        """Until `condition()` holds; what it returned."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, (
                f"{self.error} {self.run('return document.body.innerText')}"
            )
            time.sleep(0.02)
        return found

    def fill(self, name, text):
        """As if it were typed."""
        self.one(f"#{name}").clear()
        self.one(f"#{name}").send_keys(text)

    def press(self, *keys):
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def hover(self, element):
        webdriver.ActionChains(self.driver).move_to_element(element).perform()

    def click(self, css):
        self.one(css).click()

    def choose(self, element):
        """A click, wherever it is: something may lie over it."""
        self.run("arguments[0].click()", element)

    @property
    def error(self):
        return self.one("#error").text

    @property
    def tokens(self):
        return self.all("#text [role=option]")

    @property
    def text(self):
        """The tokens that are shown, without the marks of line breaks."""
        return self.run(
            "return [...document.querySelectorAll('#text [role=option]')].map(t =>"
            "[...t.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join('')).join('')"
        )

    def done(self):
        """Whether the text is complete."""
        return not self.one("#stop").is_enabled()

    def generate(self, prompt, count, seed=1):
        self.fill("prompt", prompt)
        self.fill("max_tokens", str(count))
        self.fill("seed", str(seed))
        self.click("#start")
        self.wait(lambda: len(self.tokens) == len(prompt) + count and self.done())

    def score(self, text):
        self.fill("prompt", text)
        self.click("#score")
        self.wait(lambda: "bits per byte" in self.one("#status").text)

    def rivals(self):
        """Texts, bars and percentages of the rivals."""
        return self.run(
            "return [...document.querySelectorAll('#rivals li button')].map(b => ["
            "b.querySelector('.name').textContent, "
            "parseFloat(b.querySelector('.bar').style.getPropertyValue('--p')), "
            "b.querySelector('.percent').textContent])"
        )


@pytest.fixture(name="driver", scope="module")
def fixture_driver():
    driver = chromium.start()
    yield driver
    driver.quit()


@pytest.fixture(name="page")
def fixture_page(driver):
    """Ends with an error if the browser has complained."""
    driver.get_log("browser")
    page = Page(driver)
    yield page
    allowed = re.compile(r"status of (400|401|404)|CONNECTION_REFUSED")
    complaints = [entry["message"] for entry in driver.get_log("browser")]
    assert [line for line in complaints if not allowed.search(line)] == []


@pytest.fixture(name="address", scope="module")
def fixture_address():
    with serving() as address:
        yield address


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory):
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "text.txt").write_text(TEXT)
    for run, layers in (("one", 1), ("two", 2)):
        words = [*tiny_run(model__n_layers=layers), "--run", run]
        assert run_script("train.py", *words, folder=folder).code == 0
    return folder


def make_slow(address, monkeypatch):
    step = address.engine._batch.step

    def slow_step():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(address.engine._batch, "step", slow_step)


def begin_long(page, address, monkeypatch):
    """A text that is still arriving."""
    make_slow(address, monkeypatch)
    page.open(address)
    page.fill("prompt", "abc")
    page.fill("max_tokens", "20000")
    page.click("#start")
    page.wait(lambda: len(page.tokens) > 10)


def log_probs_of(text):
    ids = TOKENIZER.encode(text)
    return ids, np.asarray(jax.nn.log_softmax(eqx.filter_jit(served_model())(jnp.asarray(ids))))


# -- generate ------------------------------------------------------------------------------------


def test_tokens_arrive_as_they_are_made(page, address, monkeypatch):
    make_slow(address, monkeypatch)
    page.open(address)
    page.fill("prompt", "abc")
    page.fill("max_tokens", "300")
    page.fill("seed", "1")
    page.click("#start")
    counts = []

    def complete():
        counts.append(page.run("return document.getElementById('text').children.length"))
        return counts[-1] == 303 and page.done()

    page.wait(complete)
    assert counts == sorted(counts)
    assert len(set(counts)) > 5
    first = page.text
    assert first.startswith("abc")
    assert "300 tokens" in page.one("#status").text
    assert "seed 1" in page.one("#status").text
    page.generate("abc", 300)
    assert page.text == first
    page.generate("abc", 300, seed=2)
    assert page.text != first


def test_each_token_is_shaded_by_its_probability(page, address):
    page.open(address)
    page.generate("abc", 40)
    ids, log_probs = log_probs_of(page.text[: TINY.context_length])
    for place in range(1, len(ids)):
        expected = min(9, int(-1.5 * log_probs[place - 1, ids[place]]))
        assert page.tokens[place].get_attribute("class").split() == ["token", f"p{expected}"]
    alphas = [
        page.run("return getComputedStyle(arguments[0]).backgroundColor", page.tokens[place])
        for place in range(40)
    ]
    assert len(set(alphas)) > 1


def test_the_rivals_of_a_token(page, address):
    """Under the pointer, and with the keyboard."""
    page.open(address)
    page.generate("abc", 5)
    ids, log_probs = log_probs_of(page.text)
    for place in (2, 6):
        page.hover(page.tokens[place])
        name = TOKENIZER.characters[ids[place]]
        page.wait(lambda name=name: page.one("#rivals h2").text.startswith(f"{name}: "))
        row = log_probs[place - 1]
        best = np.argsort(row)[::-1][:10]
        rivals = page.rivals()
        assert [text for text, _, _ in rivals] == [TOKENIZER.characters[i] for i in best]
        np.testing.assert_allclose([p for _, p, _ in rivals], np.exp(row[best]), atol=1e-4)
        for (_, p, percent), button in zip(rivals, page.all("#rivals li button"), strict=True):
            assert abs(float(percent.removesuffix(" %")) - 100 * p) <= 0.51
            bar = button.find_element(By.CSS_SELECTOR, ".bar")
            assert bar.size["width"] > 30
    page.press(Keys.TAB)
    page.run("arguments[0].focus()", page.tokens[6])
    page.press(Keys.ARROW_LEFT)
    assert page.tokens[5].get_attribute("aria-selected") == "true"
    assert page.one("#rivals h2").text.startswith(TOKENIZER.characters[ids[5]])


def test_a_rival_begins_a_branch(page, address):
    page.open(address)
    page.generate("abc", 20)
    trunk = page.text
    page.tokens[8].click()
    rivals = [text for text, _, _ in page.rivals()]
    other = next(i for i, text in enumerate(rivals) if text != trunk[8])
    page.all("#rivals li button")[other].click()
    page.wait(lambda: len(page.tokens) == 29 and page.done())
    branch = page.text
    assert branch[:9] == trunk[:8] + rivals[other]
    assert "seed 9," in page.one("#status").text  # 1 + 8: other draws than at the beginning
    assert "branched" in page.tokens[8].get_attribute("class")
    # A branch of the branch.
    page.tokens[12].click()
    second = next(i for i, (text, _, _) in enumerate(page.rivals()) if text != branch[12])
    page.all("#rivals li button")[second].click()
    page.wait(lambda: len(page.tokens) == 33 and page.done())
    deepest = page.text
    assert deepest[:12] == branch[:12]
    assert len(page.all("#branches button")) == 3
    for place, text in enumerate((trunk, branch, deepest)):
        page.all("#branches button")[place].click()
        assert page.text == text
    # Back to a rival that has a branch: it is shown, not generated again.
    page.all("#branches button")[0].click()
    page.tokens[8].click()
    page.all("#rivals li button")[other].click()
    assert page.text == branch
    assert len(page.all("#branches button")) == 3


class EndingTokenizer(CharTokenizer):
    """The id 0 ends a document."""

    end_ids = (0,)


def test_the_begin_of_a_document_stays_before_a_text(page):
    """Which an empty prompt begins with: in a branch, and where the model is looked into."""
    asked = (
        "window.asked = []; const real = window.fetch; window.fetch = (path, options) => "
        "(options?.body && window.asked.push(JSON.parse(options.body)), real(path, options))"
    )
    tokenizer = EndingTokenizer(TOKENIZER.characters)
    with serving(tokenizer=tokenizer) as address:
        page.open(address)
        page.run(asked)
        page.generate("", 6, seed=2)
        page.tokens[3].click()
        page.click("#rivals li button:not([aria-current])")
        page.wait(lambda: page.one("#branches").is_displayed() and page.done())
        ids = tokenizer.encode(page.text).tolist()
        assert page.run("return window.asked.at(-1).prompt") == [0, *ids[:4]]
        page.tokens[2].click()
        page.click("#tab-look")
        page.wait(lambda: page.all("#lens tbody tr"))
        looked = page.run("return window.asked.at(-1)")
        assert looked["ids"] == [0, *ids][: len(looked["ids"])]
        assert looked["place"] == 2
        page.all("#look-text [role=option]")[0].click()  # which the begin predicts
        page.wait(lambda: "from the token before it" in page.one("#look-status").text)


def test_a_text_can_be_stopped(page, address, monkeypatch):
    begin_long(page, address, monkeypatch)
    page.click("#stop")
    page.wait(page.done)
    address.wait_until_idle()
    assert page.error == ""
    count = len(page.tokens)
    time.sleep(0.3)
    assert len(page.tokens) == count


def test_the_knobs_have_the_limits_of_sample(page, address):
    page.open(address)
    page.wait(lambda: page.one("#model").text == NAME)
    for name, first, last in (("top_k", "1", ""), ("top_p", "0.01", ""), ("min_p", "", "1")):
        slider, number = page.one(f"[data-of={name}]"), page.one(f"#{name}")
        assert number.get_attribute("placeholder") == "off"
        for key, value in ((Keys.HOME, first), (Keys.END, last)):
            slider.send_keys(key)
            assert number.get_attribute("value") == value
            assert slider.get_attribute("aria-valuetext") == (value or "off")
    page.fill("min_p", "")
    page.fill("top_k", "5")
    middle = float(page.one("[data-of=top_k]").get_attribute("value"))
    assert abs(middle - np.log(5)) < 1e-6  # of a large vocabulary, small numbers matter
    page.one("[data-of=top_k]").send_keys(Keys.HOME)
    assert page.one("#top_k").get_attribute("value") == "1"
    page.generate("abc", 30, seed=1)
    greedy = page.text
    page.generate("abc", 30, seed=2)
    assert page.text == greedy
    page.one("[data-of=top_k]").send_keys(Keys.END)
    assert page.one("#top_k").get_attribute("value") == ""
    for name, value in (("top_p", "7"), ("max_tokens", "")):
        page.fill(name, value)
        page.click("#start")
        what = name.replace("max", "max_new")
        page.wait(lambda what=what: page.error.startswith(f"{what}: "))
        page.fill(name, "1")


def test_the_servers_sentences_are_shown(page, address):
    page.open(address)
    page.fill("prompt", "a" * 13)
    page.click("#start")
    page.wait(lambda: "1 to 12 tokens" in page.error)
    page.generate("abc", 3)
    assert page.error == ""


def test_a_text_is_scored(page, address):
    text = "abcdefghijkl"
    page.open(address)
    page.score(text)
    ids, log_probs = log_probs_of(text)
    found = np.array([log_probs[place - 1, i] for place, i in enumerate(ids) if place])
    status = page.one("#status").text
    assert f"12 tokens: {-found.mean():.4f} nats a token" in status
    assert f"{-found.mean() / np.log(2):.4f} bits per byte" in status
    worst = set((1 + np.argsort(found)[:10]).tolist())
    marked = {i for i, t in enumerate(page.tokens) if "surprising" in t.get_attribute("class")}
    assert marked == worst
    page.all("#surprises button")[0].click()
    assert page.tokens[1 + int(found.argmin())].get_attribute("aria-selected") == "true"


def test_each_branch_keeps_what_is_said_of_it(page, address):
    """Also the marks of a text that was scored."""
    page.open(address)
    page.score("abcdefghijkl")
    scored = page.one("#status").text
    page.tokens[3].click()
    page.click("#rivals li button:not([aria-current])")
    page.wait(page.done)
    generated = page.one("#status").text
    assert generated.startswith("200 tokens, ")
    assert not page.one("#surprises").is_displayed()
    for place, status, marked in ((0, scored, 10), (1, generated, 0)):
        page.all("#branches button")[place].click()
        assert page.one("#status").text == status
        assert len(page.all("#text .surprising")) == marked
        assert page.one("#surprises").is_displayed() == (marked > 0)


def test_the_nats_are_those_of_what_was_generated(page, address):
    page.open(address)
    page.generate("mabcd", 4)
    ids, log_probs = log_probs_of(page.text)
    nats = -np.mean([log_probs[place - 1, ids[place]] for place in range(5, 9)])
    found = re.fullmatch(r"4 tokens, .* seed 1, (.*) nats a token", page.one("#status").text)
    assert found is not None
    assert abs(float(found[1]) - nats) < 1e-3


def test_a_request_that_fails_leaves_the_text(page, address):
    page.open(address)
    page.generate("abc", 20)
    text, status = page.text, page.one("#status").text
    for prompt, button, sentence in (
        ("", "#start", "one character"),
        ("z", "#start", "z"),
        ("z", "#score", "z"),
    ):
        page.fill("prompt", prompt)
        page.click(button)
        page.wait(lambda sentence=sentence: sentence in page.error and page.done())
        assert (page.text, page.one("#status").text) == (text, status)


def test_a_pointer_that_rests_selects_nothing(page, address):
    """The text may move below it."""
    page.open(address)
    page.generate("abc", 200)

    def selected():
        return page.run(
            "return [...document.querySelectorAll('#text [role=option]')]"
            ".findIndex(t => t.hasAttribute('aria-selected'))"
        )

    page.hover(page.tokens[150])
    page.wait(lambda: selected() == 150)
    page.run("document.getElementById('prompt').rows = 2")
    page.run("document.getElementById('text').style.fontSize = '150%'")
    time.sleep(0.5)
    assert selected() == 150
    # Nor does it select a token again that was clicked at once: its rivals can be clicked.
    page.tokens[100].click()
    rival = page.one("#rivals li button")
    time.sleep(0.5)
    assert rival.is_displayed()


# -- look inside ---------------------------------------------------------------------------------


def test_look_inside(page, address):
    text, place = "mabcdefgcba", 7
    page.open(address)
    page.score(text)
    page.tokens[place].click()
    rivals = page.rivals()
    page.click("#tab-look")
    page.wait(lambda: len(page.all("#lens tbody tr")) == 3)  # before, between and after 2 layers
    cells = page.all("#lens tbody tr:last-child td")
    assert [cell.text.split()[0] for cell in cells[:5]] == [name for name, _, _ in rivals[:5]]
    model, ids = served_model(), jnp.asarray(TOKENIZER.encode(text))
    lens = jax.nn.log_softmax(eqx.filter_jit(logit_lens)(model, ids)[:, place - 1])
    for row, log_probs in zip(page.all("#lens tbody tr"), np.asarray(lens), strict=True):
        cells = row.find_elements(By.TAG_NAME, "td")
        assert cells[0].text.split()[0] == TOKENIZER.characters[int(log_probs.argmax())]
        chosen = 100 * np.exp(log_probs[int(ids[place])])
        assert abs(float(cells[5].text.removesuffix(" %")) - chosen) <= 0.51
    maps = list(attention_maps(model, ids).values())
    assert len(page.all("#heads canvas")) == 2 * TINY.n_heads

    def highlights():
        return page.run(
            "return [...document.querySelectorAll('#look-text [role=option]')]"
            ".map(t => parseFloat(t.style.getPropertyValue('--p')))"
        )

    rows = np.stack([np.asarray(weights)[:, place - 1] for weights in maps])
    mean = rows.mean(axis=(0, 1))
    np.testing.assert_allclose(highlights(), mean / mean.max(), atol=2e-3)
    page.click("[aria-label='layer 2, head 1']")
    np.testing.assert_allclose(highlights(), rows[1, 0] / rows[1, 0].max(), atol=2e-3)
    assert page.one("[aria-label='layer 2, head 1']").get_attribute("aria-pressed") == "true"
    # The picture of a head is its map.
    pixels = page.run(
        "const c = document.querySelector('[aria-label=\"layer 1, head 2\"] canvas');"
        "return [c.width, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]"
    )
    alphas = np.array(pixels[1]).reshape(pixels[0], pixels[0], 4)[..., 3]
    # Alpha is rounded, and was computed from a rounded weight.
    weights = np.asarray(maps[0])[1]
    np.testing.assert_allclose((alphas / 255) ** 2, weights, atol=1.5 / 255 + 1e-4)
    page.all("#look-text [role=option]")[0].click()
    page.wait(lambda: "Nothing predicts the first token" in page.one("#look-status").text)


def test_look_inside_of_a_text_beyond_the_context(page, address):
    page.open(address)
    page.generate("abc", 40)
    page.tokens[39].click()
    page.click("#tab-look")
    page.wait(lambda: "from the 11 tokens before it" in page.one("#look-status").text)
    p = page.run(
        "return [...document.querySelectorAll('#look-text [role=option]')]"
        ".map(t => parseFloat(t.style.getPropertyValue('--p')))"
    )
    assert next(i for i, weight in enumerate(p) if weight) == 28
    assert max(i for i, weight in enumerate(p) if weight) == 38


# -- runs ----------------------------------------------------------------------------------------


def row_of(page, name):
    """The cells of a run, by the heads of the table."""
    rows = page.run(
        "return [...document.querySelectorAll('#runs-table tbody tr')]"
        ".map(r => [...r.cells].map(c => c.innerText))"
    )
    heads = ("show", "run", "state", "preset", "parameters", "steps", "best loss", "began")
    found = [dict(zip(heads, row, strict=True)) for row in rows]
    return next((row for row in found if row["run"] == name), {})


def test_a_run_is_followed_while_it_trains(page, address, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "live"
    run.mkdir(parents=True)
    shutil.copy(folder / "runs" / "one" / "config.json", run)
    line = {"step": 1, "train_loss": 3.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with RunFolder(run) as training:
        training.lock()
        page.open(address, "runs")
        page.wait(lambda: row_of(page, "live").get("steps") == "1 / 6")
        assert row_of(page, "live")["state"] == "running"
        # A reader's place in the table, and the focus, are kept.
        page.run("window.row = document.querySelector('#runs-table tbody tr')")
        page.run("window.row.querySelector('input').focus()")
        with (run / "metrics.jsonl").open("a") as file:
            for step in (2, 3):
                file.write(json.dumps({"step": step, "train_loss": 4.0 - step}) + "\n")
        page.wait(lambda: row_of(page, "live")["steps"] == "3 / 6")
        assert page.run(
            "return document.querySelector('#runs-table tbody tr') === window.row"
            " && window.row.contains(document.activeElement)"
        )

        def picture():
            return page.run("return document.getElementById('curves').toDataURL()")

        before = page.wait(lambda: picture())
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "train_loss": 0.5, "val_loss": 0.7}) + "\n")
        page.wait(lambda: picture() != before)
    page.wait(lambda: row_of(page, "live")["state"] == "stopped")
    linear = picture()
    page.click("#log-loss")
    page.wait(lambda: picture() != linear)
    heads = "document.querySelectorAll('#runs-table th[scope=row]')"
    names = f"return [...{heads}].map(h => h.innerText)"
    later = shutil.copytree(run, tmp_path / "runs" / "later")
    (later / "tokenizer.json").touch()  # when it began
    page.wait(lambda: page.run(names) == ["later", "live"])
    page.run("window.row.querySelector('input').focus()")
    for name in ("config.json", "tokenizer.json"):  # begun anew
        (run / name).touch()
    page.wait(lambda: page.run(names) == ["live", "later"])
    assert page.run("return window.row.contains(document.activeElement)")
    shutil.rmtree(later)
    page.wait(lambda: page.run(names) == ["live"])


def test_two_runs_of_which_one_is_begun_anew(page, address, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(folder / "runs" / name, tmp_path / "runs" / name)

    def differences():
        rows = "[...document.querySelectorAll('#difference tbody th')]"
        return page.run(f"return {rows}.map(cell => cell.innerText)")

    page.open(address, "runs")
    page.wait(lambda: differences() == ["model.n_layers"])
    content = json.loads((tmp_path / "runs" / "two" / "config.json").read_text())
    content["training"]["seed"] = 7  # as if it were trained again, or resumed
    (tmp_path / "runs" / "two" / "config.json").write_text(json.dumps(content))
    page.wait(lambda: differences() == ["model.n_layers", "training.seed"])


def test_two_runs_side_by_side(page, address, folder, monkeypatch):
    monkeypatch.chdir(folder)
    page.open(address, "runs")
    page.wait(lambda: page.one("#pair").is_displayed() and page.all("#difference tbody tr"))
    rows = [row.text.split() for row in page.all("#difference tbody tr")]
    assert {row[0]: set(row[1:]) for row in rows} == {"model.n_layers": {"1", "2"}}
    result = json.loads((folder / "runs" / "two" / "result.json").read_text())
    row = row_of(page, "two")
    assert row["state"] == "done"
    assert row["steps"] == "6 / 6"
    assert row["parameters"] == f"{result['parameters']:,}"
    assert row["best loss"] == f"{result['best_val_loss']:.4f}"
    page.one("#continue [name=seed]").clear()
    page.one("#continue [name=seed]").send_keys("3")
    page.click("#continue button")

    def texts():
        return {
            section.find_element(By.TAG_NAME, "h3").text: section.find_element(By.TAG_NAME, "p")
            for section in page.all("#continued section")
        }

    def is_shown(name, text):  # as soon as there is a section of that name
        return name in (found := texts()) and found[name].get_property("textContent") == text

    for name in ("one", "two"):
        words = ("--run", name, "--prompt", "The", "--seed", "3", "--max-new-tokens", "200")
        expected = "The" + run_script("sample.py", *words, folder=folder).out.rstrip("\n")
        page.wait(lambda name=name, text=expected: is_shown(name, text))
    page.all("#runs-table tbody input")[0].click()
    page.wait(lambda: not page.one("#pair").is_displayed())


def test_all_runs_are_ticked_at_once(page, address, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        run = tmp_path / "runs" / f"run-{number}"
        run.mkdir(parents=True)
        shutil.copy(folder / "runs" / "one" / "config.json", run)
        lines = [{"step": 1, "train_loss": 3.0, "val_loss": number}, {"step": 2, "train_loss": 1.0}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ticked():
        boxes = page.all("#runs-table tbody input")
        return sum(box.is_selected() for box in boxes), len(boxes)

    def curves():
        return page.one("#curves").get_attribute("data-curves")

    page.open(address, "runs")
    page.wait(lambda: ticked() == (3, 20) and curves() == "6")
    assert len(page.all("#curve-names > span")) == 3
    colours = (
        "return [...document.querySelectorAll('#curve-names .swatch')].map(s => s.style.background)"
    )
    first, *others = page.run(colours)
    page.click("#runs-table tbody input")
    assert page.run(colours) == others
    page.click("#all-runs")
    page.wait(lambda: ticked() == (20, 20) and curves() == "40")
    assert page.run(colours)[0] == first
    assert "and 4 more" in page.one("#curve-names").text
    # A curve of one point is drawn.
    page.click("#show-train")
    picture = "return document.getElementById('curves').toDataURL()"
    with_points = page.run(picture)
    page.click("#show-validation")
    assert page.run(picture) != with_points
    page.click("#show-validation")
    page.click("#show-train")
    page.click("#all-runs")
    page.wait(lambda: ticked() == (0, 20) and curves() == "0")


def test_a_comparison_with_its_intervals_curves_and_ledger(page, address, folder, monkeypatch):
    kept = folder / "comparisons" / "norms"
    write_ledger(kept)
    monkeypatch.chdir(folder)
    page.open(address, "runs")
    page.wait(lambda: page.all("#comparisons summary"))
    page.click("#comparisons summary")
    page.wait(lambda: page.all("#comparisons table"))
    rows = [row.text for row in page.all("#comparisons tbody tr")]
    assert len(rows) == 6
    assert "better the interval of 6 differences, -0.1000" in rows[2]
    assert rows[3].startswith(HOSTILE)  # as text
    assert page.all("#comparisons img") == []
    # Its interval is to the left of 0, the middle.
    place = "document.querySelectorAll('#comparisons tbody tr')[2].querySelector('.interval')"
    middle, right = page.run(
        f"const whole = {place}.getBoundingClientRect();"
        f"const bar = {place}.firstChild.getBoundingClientRect();"
        "return [whole.left + whole.width / 2, bar.right]"
    )
    assert right < middle
    drawn = (
        "const c = document.querySelector('#comparisons canvas');"
        "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)"
    )
    assert page.run(drawn)
    assert "2 new seeds" in page.one("#comparisons").text
    page.click("#comparisons .ledger summary")
    entries = [entry.text for entry in page.all("#comparisons .ledger li")]
    assert len(entries) == 19
    assert "n-layers=99, seeds 0 to 5, failed: RuntimeError: no memory" in entries[14]
    (kept / "ledger.jsonl").unlink()
    page.click("#comparisons summary")
    page.click("#comparisons summary")
    page.wait(lambda: "There is no 'norms'" in page.error)


def test_there_are_no_runs(page, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page.open(address, "runs")
    page.wait(lambda: "There are no runs" in page.one("#runs").text)


# -- for everyone --------------------------------------------------------------------------------


class HostileTokenizer(CharTokenizer):
    """Tokens that would like to be HTML, and characters that change how others are shown."""

    hostile = (
        "<script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked=1'>",
        "</section></main>",
        "\x00\x07\x1b[31m\u3164",
        "\u202eevil\u2066",
        "&lt;b&gt;",
        "x" * 900,
    )

    def token_bytes(self, token: int) -> bytes:
        return self.hostile[token % len(self.hostile)].encode()


@pytest.mark.parametrize("width", [360, 1200])
def test_a_text_never_becomes_html(page, folder, width, tmp_path, monkeypatch):
    """Nor does the name of a run."""
    monkeypatch.chdir(tmp_path)
    name = "<img src=x onerror='window.hacked=1'>\u202e"
    (tmp_path / "runs" / name).mkdir(parents=True)
    shutil.copy(folder / "runs" / "one" / "config.json", tmp_path / "runs" / name)
    with serving(tokenizer=HostileTokenizer(TOKENIZER.characters)) as address:
        page.open(address, width=width, height=800)
        page.fill("prompt", "abcdefg")
        page.fill("max_tokens", "50")
        page.fill("seed", "1")
        page.click("#start")
        page.wait(lambda: len(page.tokens) == 57 and page.done())
        page.choose(page.tokens[20])
        page.choose(page.one("#rivals li button:not([aria-current])"))
        page.wait(lambda: page.one("#branches").is_displayed() and page.done())
        seen = page.text
        assert "<script>window.hacked = 1</script>" in seen
        assert "␀␇␛[31m⟨3164⟩" in seen
        assert "⟨202e⟩evil⟨2066⟩" in seen
        page.choose(page.tokens[20])
        page.click("#tab-look")
        page.wait(lambda: page.all("#lens tbody tr"))
        fits(page, width)
        page.click("#tab-runs")
        page.wait(lambda: page.all("#runs-table tbody tr"))
        assert "⟨202e⟩" in page.one("#runs-table tbody").text
        fits(page, width)
        assert page.run("return window.hacked") is None
        assert len(page.all("script")) == 1
        assert page.all("main img") == []


def fits(page, width):
    """Nothing is wider than the window."""
    assert page.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone(page, address, folder, monkeypatch, dark):
    """With 10,000 characters that have no space."""
    monkeypatch.chdir(folder)
    with serving(context_length=12, max_rows=64, max_waiting=2000) as wide:
        page.open(wide, width=360, height=800, dark=dark)
        page.run("document.getElementById('prompt').value = 'abcdefghijklm'.repeat(50)")
        page.click("#score")
        page.wait(lambda: "bits per byte" in page.one("#status").text)
        assert len(page.tokens) == 650
        fits(page, 360)
        page.choose(page.tokens[5])
        assert page.one("#rivals").is_displayed()
        for _ in range(12):
            page.press(Keys.ARROW_DOWN)
            on_top = (
                "const t = document.activeElement, r = t.getClientRects()[0];"
                "const [x, y] = [r.x + r.width / 2, r.y + r.height / 2];"
                "return t.contains(document.elementFromPoint(x, y))"
            )
            assert page.run(on_top)
        for view in ("look", "runs"):
            page.click(f"#tab-{view}")
            page.wait(lambda: page.all("#lens tbody tr, #runs-table tbody tr"))
            fits(page, 360)


def test_everything_can_be_done_with_the_keyboard(page, address):
    page.open(address)
    page.wait(lambda: page.one("#model").text == NAME)

    def focused():
        return page.driver.switch_to.active_element

    def tab_to(condition):
        for _ in range(40):
            page.press(Keys.TAB)
            if condition(focused()):
                return
        raise AssertionError("the keyboard does not reach it")

    tab_to(lambda e: e.get_attribute("role") == "tab")
    page.press(Keys.ARROW_RIGHT)
    assert page.one("#look").is_displayed()
    page.press(Keys.ARROW_LEFT)
    tab_to(lambda e: e.get_attribute("id") == "prompt")
    page.press("abc")
    tab_to(lambda e: e.get_attribute("id") == "max_tokens")
    page.press(Keys.CONTROL, "a", Keys.NULL)
    page.press("20")
    tab_to(lambda e: e.get_attribute("id") == "start")
    page.press(Keys.SPACE)
    page.wait(lambda: len(page.tokens) == 23 and page.done())
    tab_to(lambda e: e.get_attribute("role") == "option")
    page.press(Keys.END, Keys.HOME, *[Keys.ARROW_RIGHT] * 10)
    assert focused() == page.tokens[10]
    assert re.match(r"., \d", focused().get_attribute("aria-label"))
    trunk = page.text
    page.press(Keys.ENTER)
    assert focused().find_element(By.XPATH, "ancestor::section[1]").get_attribute("id") == "rivals"
    page.press(Keys.ESCAPE)
    assert focused() == page.tokens[10]
    page.press(Keys.ENTER, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    if focused().get_attribute("aria-current"):
        page.press(Keys.ARROW_DOWN)
    page.press(Keys.ENTER)
    page.wait(lambda: page.one("#branches").is_displayed() and page.done())
    assert page.text[:10] == trunk[:10]
    assert page.text != trunk
    tab_to(lambda e: e.find_elements(By.XPATH, "ancestor::section[@id='branches']"))
    page.press(Keys.ENTER)
    assert page.text == trunk


def test_a_screen_reader_finds_names_and_is_told_of_the_text(page, address, folder, monkeypatch):
    """Every control has a name in the browser's tree for assistive technology."""
    monkeypatch.chdir(folder)
    page.open(address)
    page.generate("abc", 20)
    page.tokens[10].click()
    generated = page.text[3:]
    assert page.one("#live").get_attribute("aria-live") == "polite"
    assert page.one("#live").get_property("textContent").endswith(generated[-5:])
    controls = {"button", "textbox", "spinbutton", "slider", "checkbox", "tab", "listbox", "image"}
    for view in ("generate", "look", "runs"):
        page.click(f"#tab-{view}")
        page.wait(lambda: page.all("#rivals button, #lens tbody tr, #runs-table tbody tr"))
        time.sleep(0.3)
        nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        found = [n for n in nodes if n.get("role", {}).get("value") in controls]
        assert len(found) > 5
        unnamed = [n for n in found if not n.get("name", {}).get("value") and not n["ignored"]]
        assert unnamed == []


def test_the_key_is_asked_for_once(page):
    with serving(api_key="secret") as address:
        page.open(address)
        page.run("sessionStorage.clear()")
        page.driver.refresh()
        page.wait(lambda: page.one("#key").is_displayed())
        page.one("#key input").send_keys("ключ", Keys.ENTER)  # which no header can have
        page.wait(lambda: page.error == "The key is wrong.")
        page.one("#key input").clear()
        page.one("#key input").send_keys("wrong", Keys.ENTER)
        page.wait(lambda: page.one("#key").is_displayed())
        page.wait(lambda: page.one("#key input").get_property("value") == "")
        page.wait(lambda: page.error == "The key is wrong.")
        page.one("#key input").send_keys("secret", Keys.ENTER)
        page.wait(lambda: page.one("#model").text == NAME)
        page.generate("abc", 3)
        page.driver.refresh()
        page.wait(lambda: page.one("#model").text == NAME)
        assert not page.one("#key").is_displayed()
        assert page.error == ""
    page.run("sessionStorage.clear()")


def test_a_connection_that_breaks_is_said(page, address, monkeypatch):
    begin_long(page, address, monkeypatch)
    for connection in list(address.server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    page.wait(lambda: page.error == "The server ended before the text did.")
    assert len(page.tokens) > 10
    page.driver.get_log("browser")  # it complains, rightly


def test_a_server_that_has_gone_is_said(page):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving())
        page.open(address)
        page.wait(lambda: page.one("#model").text == NAME)
    page.fill("prompt", "abc")
    page.click("#start")
    page.wait(lambda: "Is gptlite serve running?" in page.error)
    page.driver.get_log("browser")  # it complains, rightly
