import dataclasses
import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import ROOT, TEXT, TINY

from gptlite.config import Config, OptimizerConfig, TrainingConfig, UserError
from gptlite.models.gpt import GPT
from gptlite.text.batches import Batches
from gptlite.text.corpus import text_corpus
from gptlite.text.tokenizer import make_tokenizer
from gptlite.text.tokens import split_corpus
from gptlite.training.loop import DivergenceError, fit

TOKENIZER = make_tokenizer("char", TEXT)
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
CONFIG = Config(
    model=TINY,
    training=TrainingConfig(
        steps=45, batch_size=8, steps_per_dispatch=10, eval_every=25, compute_dtype="float32"
    ),
)


def new_model(config: Config = CONFIG) -> GPT:
    return eqx.filter_jit(GPT)(config.model, TOKENIZER.vocab_size, key=jax.random.key(0))


def run(config: Config):
    """Everything that a run yields, with the last model's arrays."""
    records, arrays = [], []
    for progress in fit(config, new_model(config), SPLIT):
        records.append(progress.record())
        arrays = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(progress.state, eqx.is_array))]
    return records, arrays


@pytest.fixture(scope="module")
def finished():
    return run(CONFIG)


def test_it_stops_for_evaluations_and_at_the_end(finished):
    records, _ = finished
    assert [record["step"] for record in records] == [10, 20, 25, 35, 45]
    assert [record["step"] for record in records if "val_loss" in record] == [25, 45]
    assert [record["tokens"] for record in records] == [8 * 12 * r["step"] for r in records]


def test_it_learns(finished):
    records, _ = finished
    assert records[0]["train_loss"] > records[-1]["train_loss"] > 0
    assert records[-1]["val_loss"] < records[-3]["val_loss"] < np.log(TOKENIZER.vocab_size)


def test_a_line_of_metrics_has_what_it_should(finished):
    for record in finished[0]:
        assert {
            "step",
            "tokens",
            "train_loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_second",
            "seconds",
        } <= set(record)
        assert json.loads(json.dumps(record)) == record


def test_a_run_is_a_pure_function_of_its_config(finished):
    records, arrays = run(CONFIG)
    for a, b in zip(arrays, finished[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert [r["train_loss"] for r in records] == [r["train_loss"] for r in finished[0]]


def test_the_length_of_a_dispatch_changes_nothing(finished):
    training = dataclasses.replace(CONFIG.training, steps_per_dispatch=7)
    records, arrays = run(dataclasses.replace(CONFIG, training=training))
    assert [record["step"] for record in records] == [7, 14, 21, 25, 32, 39, 45]
    for a, b in zip(arrays, finished[1], strict=True):
        # Another program, so float32 may round otherwise at each of the 45 steps.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_the_callers_model_is_left_alone():
    model = new_model()
    before = [np.array(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    training = dataclasses.replace(CONFIG.training, steps=3)
    for _ in fit(dataclasses.replace(CONFIG, training=training), model, SPLIT):
        pass
    for a, b in zip(before, jax.tree.leaves(eqx.filter(model, eqx.is_array)), strict=True):
        np.testing.assert_array_equal(a, b)


# A learning rate that takes the parameters to infinity, where their differences are NaN.
EXPLODING = OptimizerConfig(
    name="adamw", learning_rate=1e38, schedule="constant", warmup_fraction=0.0
)


def test_a_loss_that_is_no_number_ends_the_run_with_the_batch_and_advice():
    with pytest.raises(DivergenceError, match=r"diverged at step 2: loss nan, grad_norm nan") as e:
        run(dataclasses.replace(CONFIG, optimizer=EXPLODING))
    assert e.value.report["learning_rate"] == pytest.approx(1e38)
    batches = Batches(SPLIT.train, 8, 12, CONFIG.training.seed)
    np.testing.assert_array_equal(e.value.windows, batches(1))


def test_updates_that_are_not_finite_can_be_skipped_and_are_counted():
    training = dataclasses.replace(CONFIG.training, on_nonfinite="skip")
    optimizer = dataclasses.replace(EXPLODING, learning_rate=1e10)
    records, arrays = run(dataclasses.replace(CONFIG, optimizer=optimizer, training=training))
    assert all(np.isfinite(array).all() for array in arrays)
    # The parameters get too large for finite gradients within the first steps, and stay so.
    made = 10 - records[0]["skipped"]
    assert 0 < made < 10
    assert [record["skipped"] for record in records] == [s - made for s in (10, 20, 25, 35, 45)]
    assert records[0]["train_loss"] > 0
    assert records[1]["train_loss"] is None
    # Here the updates themselves are too large to be measured: none is made.
    nothing = dataclasses.replace(CONFIG, optimizer=EXPLODING, training=training)
    *_, last = fit(nothing, new_model(), SPLIT)
    assert last.skipped == 45
    assert eqx.tree_equal(last.model, new_model())


def test_skipping_changes_nothing_where_all_is_finite(finished):
    training = dataclasses.replace(CONFIG.training, on_nonfinite="skip")
    records, arrays = run(dataclasses.replace(CONFIG, training=training))
    assert [record["skipped"] for record in records] == [0] * 5
    for a, b in zip(arrays, finished[1], strict=True):
        # Another program, which may round otherwise.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_validation_loss_that_is_no_number_is_not_taken_for_the_best():
    """The last update ruins the weights after the last training loss was computed."""
    training = dataclasses.replace(CONFIG.training, steps=1)
    config = dataclasses.replace(CONFIG, optimizer=EXPLODING, training=training)
    with pytest.raises(DivergenceError, match=r"at step 1: val_loss nan"):
        run(config)


def test_pauses_change_nothing(finished):
    """Neither the numbers, nor the lines of metrics, however the steps are dispatched."""
    paused = []
    for progress in fit(CONFIG, new_model(), SPLIT, pause=lambda: True):
        paused.append(progress)
    lines = [progress.record() for progress in paused if progress.ends_line]
    times = ("tokens_per_second", "step_seconds", "seconds")
    for a, b in zip(lines, finished[0], strict=True):
        assert {k: a[k] for k in a if k not in times} == {k: b[k] for k in b if k not in times}
    assert len(paused) > len(lines)
    first = paused[0]
    assert (first.step, first.ends_line, len(first.position.losses)) == (1, False, 1)


def test_a_model_of_another_vocabulary_is_refused():
    model = eqx.filter_jit(GPT)(TINY, 5, key=jax.random.key(0))
    with pytest.raises(UserError, match="vocabulary ends at 4"):
        fit(CONFIG, model, SPLIT)


def test_two_devices_do_what_one_does(finished):
    """This process has two; another has one."""
    assert jax.device_count() == 2
    program = """
import json, sys
import jax
sys.path.insert(0, "tests/training")
sys.path.insert(0, "tests")
from test_loop import CONFIG, run
assert jax.device_count() == 1
records, arrays = run(CONFIG)
print(json.dumps([records[-1]["train_loss"], records[-1]["val_loss"]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    train_loss, val_loss = json.loads(done.stdout.splitlines()[-1])
    # The same sums in another order, 45 steps long.
    assert train_loss == pytest.approx(finished[0][-1]["train_loss"], rel=1e-3)
    assert val_loss == pytest.approx(finished[0][-1]["val_loss"], rel=1e-3)


def test_devices_that_cannot_share_the_batch_are_named(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 3)
    with pytest.raises(UserError, match="multiple of the 3 devices that share it, got 8"):
        run(CONFIG)


def test_a_text_in_a_file_trains_like_one_in_memory(finished, tmp_path):
    split = split_corpus(
        text_corpus(TEXT), TOKENIZER, folder=tmp_path, in_memory=0, say=lambda _: None
    )
    assert isinstance(split.train, np.memmap)
    records, arrays = [], []
    for progress in fit(CONFIG, new_model(), split):
        records.append(progress.record())
        arrays = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(progress.state, eqx.is_array))]
    for a, b in zip(arrays, finished[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert [r["val_loss"] for r in records if "val_loss" in r] == [
        r["val_loss"] for r in finished[0] if "val_loss" in r
    ]
