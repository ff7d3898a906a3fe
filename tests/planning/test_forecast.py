"""`gptlite forecast`: a ladder, a sealed forecast, and its opening."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import TEXT, run_script

from gptlite.config import Config, DataConfig
from gptlite.errors import UserError
from gptlite.planning import ladder, recipe
from gptlite.planning.journal import ForecastJournal, Judged, Sealed, Trained
from gptlite.planning.recipe import Rung, check_free, decay_for, with_recipe

SETTINGS = ["--data.corpus", "text.txt", "--model.context-length", "32", "--name", "text"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a forecast, `text`, that was sealed and opened, with tiny models."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text(TEXT * 40)
    with pytest.MonkeyPatch.context() as patched:
        small(patched)
        for name, words in [("sealed", SETTINGS), ("again", SETTINGS), ("opened", [])]:
            words = words or ["open", "text", "--data.corpus", "text.txt"]
            words = [*words, *(["--minutes", "0.02"] if name != "opened" else [])]
            done = run_script("gptlite", "forecast", *words, folder=folder)
            assert done.code == 0, done.err
            (folder / name).write_text(done.out)
    return folder


def small(patched):
    patched.setattr(ladder, "SHAPES", ((1, 8), (1, 16)))
    patched.setattr(ladder, "FEWEST", 2**11)
    patched.setattr(ladder, "PER_PARAMETER", (0.1, 30.0))
    patched.setattr(ladder, "FEWEST_RUNGS", 2)


def test_a_forecast_is_sealed_before_its_model_is_trained(place):
    journal = ForecastJournal(place / "forecasts" / "text" / "ledger.jsonl")
    kinds = [type(entry) for entry in journal.entries[1:]]
    at = kinds.index(Sealed)
    assert at >= 2
    assert kinds[at:] == [Sealed, Trained, Judged]
    assert set(kinds[:at]) == {Trained}
    sealed, opened, judged = journal.entries[-3:]
    assert isinstance(sealed, Sealed)
    assert isinstance(opened, Trained)
    assert isinstance(judged, Judged)
    assert judged.loss == pytest.approx(np.mean(opened.losses))
    assert judged.is_inside == (sealed.low <= judged.loss <= sealed.high)
    largest = max(x.parameters * x.tokens for x in list(journal.of(Trained))[:-1])
    assert opened.parameters * opened.asked == pytest.approx(10 * largest, rel=1e-3)
    said = (place / "sealed").read_text()
    lines = (place / "forecasts" / "text" / "ledger.jsonl").read_bytes().splitlines()
    assert json.loads(lines[at + 2])["before"] in said  # the checksum


def test_the_same_command_again_trains_nothing(place):
    """It says what waits, and how it is opened."""
    again = (place / "again").read_text()
    assert "training" not in again
    assert "gptlite forecast open text" in again


def test_the_verdict_is_told(place):
    said = (place / "opened").read_text()
    assert re.search(r"forecast \d\.\d{4} \(\d\.\d{4} to \d\.\d{4}\), reached \d\.\d{4}, ", said)
    assert ("OUTSIDE" in said) != ("inside" in said)


def test_a_forecast_is_opened_once(place):
    words = ["open", "text", "--data.corpus", "text.txt"]
    done = run_script("gptlite", "forecast", *words, folder=place)
    assert done.code == 2
    assert "has no sealed forecast" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["open", "absent"], "There is no forecast forecasts/absent"),
        (["open", "../text"], "NAME"),
        (["open", "text"], "read only if the command names it: --data.corpus text.txt"),
        (["--name", "a/b"], "--name"),
        (["--minutes", "0"], "minutes must be above 0"),
        (["--times", "0.5"], "times must be at least 1"),
        (["--model.d-model", "64"], "--model.d-model is chosen for each model: leave it out"),
        (["--optimizer.learning-rate", "0.1"], "--optimizer.learning-rate is chosen"),
        (["--model.lora", "8"], "leave --model.lora out"),
        (["--mesh.fsdp", "2"], "leave --mesh.fsdp out"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words, said, place):
    done = run_script("gptlite", "forecast", *words, folder=place)
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_another_text_or_other_settings_need_another_name(place, tmp_path):
    (place / "other.txt").write_text(TEXT[::-1] * 40)
    other = ["--data.corpus", "other.txt", *SETTINGS[2:]]
    done = run_script("gptlite", "forecast", *other, folder=place)
    assert "was begun with another text" in done.err
    done = run_script("gptlite", "forecast", *SETTINGS, "--model.mlp", "gelu", folder=place)
    assert "was begun with another code or other settings" in done.err


def test_too_few_rungs_make_no_law(place, monkeypatch):
    small(monkeypatch)
    monkeypatch.setattr(ladder, "FEWEST_RUNGS", 50)
    words = [*SETTINGS[:-1], "few", "--minutes", "0.001"]
    done = run_script("gptlite", "forecast", *words, folder=place)
    assert done.code == 2
    assert "A law needs 50 rungs, and there are 1: give more --minutes" in done.err


def test_the_recipe():
    """What follows from size and length; all else stays as it was."""
    base = Config(data=DataConfig(tokenizer="byte"))
    config = with_recipe(base, Rung(4, 192, 4_000_000), unique=1_000_000)
    assert (config.model.n_layers, config.model.d_model, config.model.n_heads) == (4, 192, 3)
    assert config.model.d_ff == 384
    assert config.training.batch_size * 256 == 2048  # 1,024 tokens times the root of 4
    assert config.training.steps == round(4_000_000 / 2048)
    assert config.optimizer.learning_rate == pytest.approx(0.02 * (200 / 1953) ** 0.3)
    assert config.optimizer.weight_decay == pytest.approx(0.3)
    assert config.data == base.data
    assert recipe.chosen_by_hand(base) == []
    with pytest.raises(UserError, match=r"--model.n-layers, --training.batch-size is chosen"):
        check_free(with_batch_and_layers(base))


def with_batch_and_layers(config: Config) -> Config:
    model = dataclasses.replace(config.model, n_layers=5)
    training = dataclasses.replace(config.training, batch_size=16)
    return dataclasses.replace(config, model=model, training=training)


def test_the_batch_is_shared_evenly_by_the_devices():
    for rows in (1, 2, 3, 8):
        config = with_recipe(Config(), Rung(2, 64, 10**6), unique=10**6, rows=rows)
        assert config.training.batch_size % rows == 0
        tokens = config.training.steps * config.training.batch_size * 256
        assert tokens == pytest.approx(10**6, rel=0.01)


def test_weight_decay_grows_with_the_rounds():
    assert [decay_for(x) for x in (0.5, 1, 11, 31)] == pytest.approx([0, 0, 1, 3])


@pytest.mark.parametrize(
    ("parameters", "tokens", "unique", "right"),
    [(100, 200, 100, True), (100, 199, 100, False), (400, 800, 100, True), (401, 999, 100, False)],
)
def test_a_model_is_not_too_large_for_its_time_nor_for_its_text(parameters, tokens, unique, right):
    assert recipe.is_sensible(parameters, tokens, unique) == right


def test_the_table_and_the_picture_are_files(place):
    folder = place / "forecasts" / "text"
    assert (folder / "table.txt").read_text().startswith("loss = ")
    assert (folder / "forecast.png").read_bytes().startswith(b"\x89PNG")
