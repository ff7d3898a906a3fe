"""gptlite/planning/plan.py: `gptlite train --minutes`."""

import json
import math
from pathlib import Path

import pytest
from conftest import TEXT, run_script

from gptlite.errors import UserError
from gptlite.planning.plan import FILE, Plan, Promise, kept_plan
from gptlite.planning.recipe import SHAPES
from gptlite.runs.display import Display
from gptlite.runs.find import list_steps
from gptlite.runs.saved_config import load_config

SETTINGS = ["--data.corpus", "text.txt", "--model.context-length", "32"]
SETTINGS += ["--training.sample-tokens", "0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a text, and a run of a tenth of a minute, `planned`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT * 40)
    words = ["--minutes", "0.1", "--run", "planned"]
    done = run_script("train.py", *words, *SETTINGS, folder=folder)
    assert done.code == 0, done.err
    (folder / "said").write_text(done.out)
    return folder


def record(path: Path) -> dict:
    return json.loads(path.read_text())


def test_a_run_says_before_what_it_expects_and_after_what_came_of_it(place):
    run, said = place / "runs" / "planned", (place / "said").read_text()
    plan, result = record(run / "plan.json"), record(run / "result.json")
    config, last = load_config(run / "config.json"), (run / "metrics.jsonl").read_text().split("\n")
    assert plan["minutes"] == result["minutes"] == 0.1
    assert plan["low"] < plan["loss"] < plan["high"]
    assert result["expected_val_loss"] == plan["loss"]
    assert result["expected_between"] == [plan["low"], plan["high"]]
    assert (config.model.n_layers, config.model.d_model) in SHAPES
    # The steps that it came to, and no more.
    assert config.training.steps == result["steps"] == json.loads(last[-2])["step"]
    first, then = f"from {plan['low']:.3f} to {plan['high']:.3f}", "min were given"
    assert -1 < said.find("0.1 min: ") < said.find(first) < said.find(then)
    is_inside = plan["low"] <= result["final_val_loss"] <= plan["high"]
    assert ("which is not as expected" in said) != is_inside


def test_a_model_of_ones_own_keeps_its_size_and_its_rates(place):
    own = [
        "--training.eval-every",
        "7",
        "--model.n-layers",
        "1",
        "--model.d-model",
        "16",
        "--optimizer.learning-rate",
        "0.013",
    ]
    words = ["--minutes", "0.1", "--run", "own"]
    done = run_script("train.py", *words, *SETTINGS, *own, folder=place)
    assert done.code == 0, done.err
    run = place / "runs" / "own"
    config = load_config(run / "config.json")
    assert (config.model.n_layers, config.model.d_model) == (1, 16)
    assert config.optimizer.learning_rate == 0.013
    assert config.training.eval_every == 7
    assert record(run / "plan.json") == {"minutes": 0.1, "loss": None, "low": None, "high": None}
    assert config.training.steps == record(run / "result.json")["steps"] > 1
    assert "expected" not in done.out.replace("expected_", "")


def test_a_run_that_was_stopped_goes_on_with_its_plan(place, monkeypatch):
    """Its time is what is left of the minutes, and its promise stays the same."""
    update = Display.update

    def gone(display, line, steps):
        update(display, line, steps)
        raise BrokenPipeError(32, "Broken pipe")

    with monkeypatch.context() as patched:
        patched.setattr(Display, "update", gone)
        words = ["--minutes", "60", "--run", "stopped", "--model.n-layers", "1"]
        done = run_script("train.py", *words, *SETTINGS, folder=place)
    assert done.code == 141, done.err
    run = place / "runs" / "stopped"
    stopped = list_steps(run)[0]
    # As if the time were up.
    promise = {"minutes": 0.01, "loss": 3.0, "low": 2.5, "high": 3.5}
    (run / FILE).write_text(json.dumps(promise))
    words = ["--resume", "stopped", "--data.corpus", "text.txt"]
    done = run_script("train.py", *words, folder=place)
    assert done.code == 0, done.err
    config, result = load_config(run / "config.json"), record(run / "result.json")
    assert record(run / FILE) == promise
    assert result["expected_val_loss"] == 3.0
    assert config.training.steps == result["steps"]
    assert stopped < result["steps"] < stopped + 100
    assert kept_plan(run, config) is None  # what extends it now has no plan any more


def test_the_minutes_of_a_run_that_is_resumed_are_not_changed(place):
    words = ["--resume", "planned", "--minutes", "1", "--data.corpus", "text.txt"]
    done = run_script("train.py", *words, folder=place)
    assert done.code == 2
    assert "leave --minutes out" in done.err


def test_minutes_and_steps_are_not_both_given(place):
    words = ["--minutes", "1", "--training.steps", "10"]
    done = run_script("train.py", *words, *SETTINGS, folder=place)
    assert done.code == 2
    assert "leave --training.steps out" in done.err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"minutes": 0}', '{"minutes": 1, "loss": "much"}', '{"minutes": 1e300}']
)
def test_a_plan_of_a_stranger_is_checked(text, place, tmp_path):
    """A run folder may come from anywhere."""
    config = load_config(place / "runs" / "planned" / "config.json")
    (tmp_path / "config.json").write_bytes(
        (place / "runs" / "planned" / "config.json").read_bytes()
    )
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="is not a readable plan"):
        kept_plan(tmp_path, config)


@pytest.mark.parametrize(
    ("loss", "seconds", "said"),
    [
        (1.55, 301, "5 min were given, 5.02 were used; expected was a loss of 1.500 (1.400 to "),
        (1.55, 301, "1.600), and it is 1.550, as expected"),
        (1.61, 301, "and it is 1.610, which is not as expected"),
        (1.39, 301, "and it is 1.390, which is not as expected"),
        (1.55, 330, "5 min were given, 5.50 were used, 10 % more; "),
        (1.55, 270, "5 min were given, 4.50 were used, 10 % less; "),
    ],
)
def test_the_verdict(loss, seconds, said):
    assert said in Plan(Promise(5, 1.5, 1.4, 1.6)).verdict(loss, seconds)


def test_the_verdict_without_a_forecast_is_of_the_time_alone():
    assert Plan(Promise(5)).verdict(math.pi, 300) == "5 min were given, 5.00 were used"
