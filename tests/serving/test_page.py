"""The endpoints of the page, against the model called directly."""

import base64
import json
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, TINY, run_script, tiny_model, tiny_run
from support.ledgers import HOSTILE, write_ledger
from support.servers import NAME, TOKENIZER, served_model, serving

from gptlite.errors import UserError
from gptlite.inspect.attention_maps import attention_maps
from gptlite.inspect.logit_lens import logit_lens
from gptlite.research.ledger import Ledger, Variant
from gptlite.runs.find import list_steps
from gptlite.serving import models, page
from gptlite.serving.look import look_inside
from gptlite.serving.page import FILES, TokenTexts
from gptlite.serving.text import Scored, Token
from gptlite.text.tokenizer import ByteTokenizer

C = TINY.context_length
TEXT_IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(name="address", scope="module")
def fixture_address():
    with serving() as address:
        yield address


def answer(address, path, body=None, **headers) -> tuple[int, Any, Any]:
    """Status, content and headers of an answer; the content as JSON if it is that."""
    request = urllib.request.Request(f"http://127.0.0.1:{address.port}{path}", headers=headers)
    if body is not None:
        request.data = json.dumps({"model": NAME} | body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            status, content, headers = found.status, found.read(), found.headers
    except urllib.error.HTTPError as error:
        status, content, headers = error.code, error.read(), error.headers
    is_json = headers.get_content_type() == "application/json"
    return status, json.loads(content) if is_json else content, headers


def generated(address, **body):
    """The tokens of a stream."""
    asked = {"stream": True, "logprobs": 10, "seed": 1} | body
    status, content, _ = answer(address, "/page/completions", asked)
    assert status == 200, content
    *events, end = content.decode().strip().split("\n\n")
    assert end == "data: [DONE]"
    records = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [record["finish_reason"] for record in records][-1] == "length"
    return [token for record in records for token in record["tokens"]]


def log_probs_of(ids):
    model = eqx.filter_jit(served_model())
    return np.asarray(jax.nn.log_softmax(model(jnp.asarray(ids)), axis=-1))


def check_tokens(tokens, ids, log_probs, start=1):
    """Tokens from place `start` on against the model's own log probabilities. 1e-4: float32, in
    products of other shapes."""
    for place in range(start, len(ids)):
        token, row = tokens[place], log_probs[place - 1]
        assert token["id"] == ids[place]
        np.testing.assert_allclose(token["log_prob"], row[ids[place]], atol=1e-4)
        rivals = token["rivals"]
        np.testing.assert_allclose(
            [log_prob for _, _, log_prob in rivals], np.sort(row)[::-1][:10], atol=1e-4
        )
        assert [text for _, text, _ in rivals] == [TOKENIZER.characters[i] for i, _, _ in rivals]


def test_each_token_comes_with_its_rivals(address):
    tokens = generated(address, prompt="dbeb", echo=True, max_tokens=6)
    ids = [token["id"] for token in tokens]
    assert ids[:4] == TEXT_IDS[:4]
    assert [token["text"] for token in tokens] == [TOKENIZER.characters[i] for i in ids]
    assert tokens[0]["log_prob"] is None
    check_tokens(tokens, ids, log_probs_of(ids))


def test_a_branch_is_generated_from_ids(address):
    """Without the prompt in it; the same text as from a prompt that is a text."""
    from_text = generated(address, prompt="dbeb", echo=True, max_tokens=6)
    assert generated(address, prompt=TEXT_IDS[:4], max_tokens=6) == from_text[4:]


def test_a_character_of_several_tokens_comes_with_the_last_of_them():
    texts = TokenTexts()
    contents = ["é".encode()[:1], "é".encode()[1:] + b"a", b"\xe2\x80", b"b", b"\xe2"]
    rivals = [Scored(1, content, -2.0) for content in (b"c", b"\xa8", b"\xe2")]
    records = [
        texts.record(Token(Scored(0, content, -1.0), 0, rivals), final=i == 4)
        for i, content in enumerate(contents)
    ]
    assert [record["text"] for record in records] == ["", "éa", "", "\ufffdb", "\ufffd"]
    added = [[rival[3:] for rival in record["rivals"]] for record in records]
    # A rival comes with what it would add there, if that is not its name.
    assert added[1] == [["\ufffdc"], ["è"], ["\ufffd"]]
    assert added[0] == added[2] == added[4] == [[], ["\ufffd"], [""]]


def test_a_branch_begins_inside_a_character():
    """The prompt's last token is the first half of a character."""
    tokenizer = ByteTokenizer()
    with serving(served_model(), tokenizer=tokenizer) as address:
        body = {"prompt": [1, 2], "max_tokens": 3}
        assert len(generated(address, **body)) == 3


def test_a_text_is_scored(address):
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    text = "".join(TOKENIZER.characters[i] for i in ids)
    status, found, _ = answer(address, "/page/score", {"text": text})
    assert status == 200
    log_probs = log_probs_of(ids)
    check_tokens(found["tokens"], ids, log_probs)
    nats = -np.mean([log_probs[place - 1, i] for place, i in enumerate(ids) if place])
    np.testing.assert_allclose(found["nats_per_token"], nats, atol=1e-4)
    # A character is a byte here.
    np.testing.assert_allclose(found["bits_per_byte"], nats / np.log(2), atol=2e-4)


def test_a_text_beyond_the_context_is_scored_in_windows(address):
    """Each token is predicted from at least half of the context."""
    ids = np.random.default_rng(0).integers(0, 13, 5 * C + 3).tolist()
    text = "".join(TOKENIZER.characters[i] for i in ids)
    _, found, _ = answer(address, "/page/score", {"text": text})
    assert [token["id"] for token in found["tokens"]] == ids
    check_tokens(found["tokens"], ids[:C], log_probs_of(ids[:C]))
    for begin in range(C // 2, len(ids) - C // 2, C // 2):
        window = ids[begin : begin + C]
        scored = found["tokens"][begin : begin + C]
        check_tokens(scored, window, log_probs_of(window), start=C // 2)
    nats = -np.mean([token["log_prob"] for token in found["tokens"][1:]])
    np.testing.assert_allclose(found["nats_per_token"], nats, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, C])
def test_inside_of_the_model(address, count):
    ids, place = np.random.default_rng(1).integers(0, 13, count).tolist(), max(0, count - 2)
    status, found, _ = answer(address, "/page/look", {"ids": ids, "place": place})
    assert status == 200
    model, array = served_model(), jnp.asarray(ids)
    maps = attention_maps(model, array)
    assert [layer["name"] for layer in found["layers"]] == list(maps)
    for layer, weights in zip(found["layers"], maps.values(), strict=True):
        np.testing.assert_allclose(layer["row"], weights[:, place], atol=1e-4)  # 4 decimals
        assert layer["side"] == count
        for shown, head in zip(layer["maps"], weights, strict=True):
            cells = np.frombuffer(base64.b64decode(shown), np.uint8).reshape(count, count)
            np.testing.assert_allclose(cells / 255, head, atol=0.5 / 255 + 1e-5)
    lens = jax.nn.log_softmax(eqx.filter_jit(logit_lens)(model, array)[:, place], axis=-1)
    for guess, row in zip(found["guesses"], np.asarray(lens), strict=True):
        best = [log_prob for _, _, log_prob in guess["best"]]
        np.testing.assert_allclose(best, np.sort(row)[::-1][:10], atol=1e-4)
        assert guess["best"][0][0] == row.argmax()
        following = None if place + 1 == count else row[ids[place + 1]]
        assert (guess["next"] is None) == (following is None)
        if following is not None:
            np.testing.assert_allclose(guess["next"], following, atol=1e-4)


def test_a_model_that_cannot_be_served_is_let_go(tmp_path, monkeypatch):
    def check(*_):
        raise UserError("no memory")

    monkeypatch.setattr(models.Engine, "check", check)
    run: Any = SimpleNamespace(path=tmp_path, tokenizer=TOKENIZER, model=tiny_model())
    before = set(threading.enumerate())
    with pytest.raises(UserError, match="no memory"):
        models.serve_run(run, "x", max_rows=1, max_waiting=1)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_layers_stand_in_their_order():
    """Also from the tenth on."""
    model = tiny_model(n_layers=11)
    maps = attention_maps(model, jnp.asarray(TEXT_IDS))
    assert [name.split(".")[2] for name in maps] == [str(i) for i in range(11)]
    inside = look_inside(model, TEXT_IDS, 3)
    for layer, (name, weights) in zip(inside.layers, maps.items(), strict=True):
        assert layer.name == name
        np.testing.assert_allclose(layer.row, weights[:, 3], atol=1e-6)


@pytest.mark.parametrize("count", [149, 150])
def test_the_map_of_a_long_text_has_the_largest_weights(count):
    """A cell stands for several tokens where a text has more than 64."""
    model = tiny_model(context_length=160)
    ids = np.random.default_rng(2).integers(0, 13, count).tolist()
    with serving(model, context_length=160) as address:
        _, found, _ = answer(address, "/page/look", {"ids": ids, "place": 140})
    weights = next(iter(attention_maps(model, jnp.asarray(ids)).values()))
    layer = found["layers"][0]
    assert layer["side"] == 50
    cells = np.frombuffer(base64.b64decode(layer["maps"][1]), np.uint8).reshape(50, 50)
    # What follows the text is no part of a cell.
    padded = np.zeros((150, 150))
    padded[:count, :count] = weights[1]
    expected = padded.reshape(50, 3, 50, 3).max(axis=(1, 3))
    np.testing.assert_allclose(cells / 255, expected, atol=0.5 / 255 + 1e-5)


def test_a_large_model_is_looked_at_in_a_shorter_text(address, monkeypatch):
    """Its 2 layers of 2 heads have 100 weights of 5 tokens."""
    monkeypatch.setattr("gptlite.serving.look.MAX_WEIGHTS", 110)
    assert answer(address, "/page/settings")[1]["look_length"] == 5
    status, found, _ = answer(address, "/page/look", {"ids": TEXT_IDS[:5], "place": 4})
    assert (status, found["layers"][0]["side"]) == (200, 5)
    status, found, _ = answer(address, "/page/look", {"ids": TEXT_IDS[:6], "place": 4})
    assert status == 400
    assert "ids must be 1 to 5, got 6" in found["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/page/look", {"ids": [], "place": 0}, 400, "ids must be 1 to 12"),
        (
            *("/page/completions", {"model": NAME, "prompt": "a", "n": 2}, 400),
            "Give one prompt and n 1, got 1 and n 2",
        ),
        ("/page/look", {"ids": [1] * 13, "place": 0}, 400, "got 13"),
        ("/page/look", {"ids": [1, 13], "place": 0}, 400, r"from 0 to 12, got \[13\]"),
        ("/page/look", {"ids": [1, "a"], "place": 0}, 400, "Ids must be"),
        ("/page/look", {"ids": [1, True], "place": 0}, 400, "Ids must be"),
        ("/page/look", {"ids": [1], "place": 1}, 400, "place must be from 0 to 0, got 1"),
        ("/page/look", {"ids": [1]}, 400, "place must be given"),
        ("/page/score", {"text": ""}, 400, "at least one character"),
        ("/page/score", {"text": "\ud800"}, 400, "surrogate"),
        ("/page/score", {"text": "z"}, 400, "z"),
        ("/page/score", {"text": "a" * 2000}, 400, "at most 774 tokens, got 2,000"),
        ("/page/score", {"text": "a" * 100_000}, 400, "at most 3,072 characters"),
        ("/page/score", {"text": "a", "model": "../secret"}, 404, "There is no model '../secret'"),
        ("/page/score", {"text": 5}, 400, "text"),
        ("/page/completions", {"prompt": ["a", "b"]}, 400, "one prompt and n 1, got 2"),
    ],
)
def test_bad_requests_get_a_sentence(address, path, body, status, sentence):
    found, content, _ = answer(address, path, body)
    assert found == status, content
    assert re.search(sentence, content["error"]["message"])


# -- files ---------------------------------------------------------------------------------------


def test_the_page_is_small_and_complete(address):
    """65 kB, with no word of another host."""
    total = sum(file.stat().st_size for file in FILES.iterdir())
    assert total < 65_000
    for file in FILES.iterdir():
        path = "/" if file.name == "index.html" else f"/static/{file.name}"
        status, content, headers = answer(address, path)
        assert (status, content) == (200, file.read_bytes())
        assert b"://" not in content
        assert "script-src 'self'" in headers["Content-Security-Policy"]
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/none.js", "/static/"):
        assert answer(address, path)[0] == 404


def test_the_key_is_asked_for_but_not_by_the_files():
    with serving(api_key="secret") as address:
        assert answer(address, "/")[0] == answer(address, "/static/main.js")[0] == 200
        for path in ("/page/settings", "/page/runs", "/page/comparisons", "/static", "//"):
            assert answer(address, path)[0] == 401
        assert answer(address, "/page/settings", Authorization="Bearer secret")[0] == 200


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory):
    """A folder with two runs and a comparison."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "text.txt").write_text(TEXT)
    for run, layers in (("one", 1), ("two", 2)):
        words = [*tiny_run(model__n_layers=layers), "--run", run]
        assert run_script("train.py", *words, folder=folder).code == 0
    write_ledger(folder / "comparisons" / "norms")
    return folder


def test_runs_and_their_curves(address, folder, monkeypatch):
    monkeypatch.chdir(folder)
    _, runs, _ = answer(address, "/page/runs")
    assert {run["name"] for run in runs} == {"one", "two"}
    assert {run["state"] for run in runs} == {"done"}
    lines = [json.loads(line) for line in (folder / "runs/one/metrics.jsonl").open()]
    _, curves, _ = answer(address, "/page/runs/one")
    assert curves["complete"]
    steps, losses = curves["train"]
    assert steps == [line["step"] for line in lines]
    np.testing.assert_allclose(losses, [line["train_loss"] for line in lines], rtol=1e-4)
    place = f"?file={curves['file']}&start={curves['end']}"
    assert answer(address, f"/page/runs/one{place}")[1]["train"] == [[], []]
    _, config, _ = answer(address, "/page/runs/two/config")
    assert config["model.n_layers"] == 2
    for path in (
        "none",
        "..",
        "%2e%2e%2fone",
        "one?start=-1",
        "one?start=1e9",
    ):
        assert answer(address, f"/page/runs/{path}")[0] in (400, 404)
    assert answer(address, f"/page/runs/one?file={'9' * 99}&start=9")[1]["train"][0] == steps
    assert isinstance(curves["file"], str)  # it may have more digits than numbers in a browser


def test_a_run_is_continued_beside_the_served_model(address, folder, monkeypatch):
    """As sample.py does."""
    monkeypatch.chdir(folder)
    words = ("--run", "two", "--prompt", "The", "--seed", "1", "--max-new-tokens", "20")
    sampled = run_script("sample.py", *words, folder=folder).out
    for _ in range(2):
        tokens = generated(address, model="runs/two", prompt="The", max_tokens=20)
        assert "".join(token["text"] for token in tokens) + "\n" == sampled
    assert generated(address, model="runs/one", prompt="The", max_tokens=20)
    # A run that has the name of the model which is served is another model.
    assert answer(address, "/page/score", {"model": f"runs/{NAME}", "text": "a"})[0] == 404


def test_a_run_is_loaded_again_when_it_has_new_best_weights_and_not_before(
    folder, monkeypatch, tmp_path
):
    """Its engine would be stopped for nothing."""
    shutil.copytree(folder / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    run, loads = tmp_path / "runs" / "two", []
    load = models.load
    monkeypatch.setattr(
        models, "load", lambda path, **more: loads.append(path) or load(path, **more)
    )
    with serving() as address:

        def generate():
            generated(address, model="runs/two", prompt="The", max_tokens=2)

        generate()
        (run / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()  # training goes on
        generate()
        assert len(loads) == 1
        (newest,) = list_steps(run)[:1]
        path = run / "checkpoints" / str(newest) / "record" / "metadata"
        record = json.loads(path.read_text())
        record["last"]["val_loss"] = 0.5
        path.write_text(json.dumps(record))
        generate()
        assert len(loads) == 2
        # A run that has saved nothing yet.
        shutil.rmtree(run / "checkpoints")
        asked = {"model": "runs/two", "prompt": "The", "max_tokens": 2}
        status, content, _ = answer(address, "/page/completions", asked)
        assert status in (400, 404)
        assert "has no weights yet" in content["error"]["message"]


def test_a_comparison_is_what_its_ledger_says(address, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert answer(address, "/page/comparisons")[1] == ["norms"]
    status, found, _ = answer(address, "/page/comparisons/norms")
    assert status == 200
    (rows,) = found["groups"]
    assert [(row["variant"], row["verdict"], row["seeds"]) for row in rows] == [
        ("base", "", 6),
        ("base again", "chance alone", 6),
        ("norm=layer (equal time)", "better", 6),
        (HOSTILE, "no difference found", 6),
        ("n-layers=9", "stopped at step 4 of 8, behind the base by 0.1000 ± 0.0200", 0),
        ("n-layers=99", "failed", 0),
    ]
    assert rows[2]["evaluated_at"] == [4, 8]
    assert len(rows[2]["curves"]) == 6
    assert rows[2]["difference"] + rows[2]["difference_margin"] < 0
    assert rows[2]["reason"].endswith("at the level 0.01, is beyond 0")
    assert "is not beyond 0; from 0.0" in rows[3]["reason"]
    assert rows[5]["reason"] == ""
    assert found["confirmed"] == [
        f"{HOSTILE}: begun with seed 300000, and not finished",
        "norm=layer against base on the validation text, 2 new seeds: the base diverged "
        "(Student's paired t-test, once, at the level 0.01; 4 variants had been tried).",
    ]
    words = [line["words"] for line in found["ledger"]]
    assert len(words) == 19
    assert words[0] == "opened: 100 tokens to choose by, 120 to confirm"
    assert "base, seeds 0 to 5, 8 steps: 2.0000 2.1020" in words[8]
    assert "n-layers=99, seeds 0 to 5, failed: RuntimeError: no memory" in words


def test_a_comparison_that_cannot_be_shown(address, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert answer(address, "/page/comparisons/none")[0] == 404
    unnamed = folder / "comparisons" / os.fsdecode(b"\xfe")
    unnamed.mkdir()
    (unnamed / "ledger.jsonl").write_bytes(b"")
    assert answer(address, "/page/comparisons")[:2] == (200, ["norms"])
    linked = folder / "comparisons" / "linked"
    linked.mkdir()
    (linked / "ledger.jsonl").symlink_to(folder / "text.txt")
    damaged = folder / "comparisons" / "damaged"
    damaged.mkdir()
    (damaged / "ledger.jsonl").write_text("{}\n")
    large = Ledger(folder / "comparisons" / "large" / "ledger.jsonl")
    monkeypatch.setattr(page, "MAX_VARIANTS", 1)
    for key in ("00", "11"):
        large.append(Variant(key * 8, "base", None, None, None, {}, {}, 1, 1))
    for name, said in (
        ("linked", "cannot be read: it is a link"),
        ("damaged", "is damaged, or was changed, at line 1"),
        ("large", "It has 2 variants: 1 can be shown."),
    ):
        status, content, _ = answer(address, f"/page/comparisons/{name}")
        assert status == 400
        assert said in content["error"]["message"]
    monkeypatch.setattr(page, "MAX_SHOWN", 1000)
    assert "and at most 1,000 are" in str(answer(address, "/page/comparisons/norms")[1])
    for name in ("linked", "damaged", "large"):
        shutil.rmtree(folder / "comparisons" / name)


def test_the_inside_of_a_model_that_is_not_a_number_can_be_seen():
    model = jax.tree.map(lambda x: x * jnp.nan if eqx.is_inexact_array(x) else x, served_model())
    with serving(model) as address:
        status, found, _ = answer(address, "/page/look", {"ids": TEXT_IDS[:5], "place": 4})
        assert status == 200
        assert found["layers"][0]["row"] == [[None] * 5] * TINY.n_heads
        assert found["guesses"][0]["best"][0][2] is None
