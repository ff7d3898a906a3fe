import contextlib
import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import TEXT, TINY
from jax.sharding import Mesh

from gptlite.config import Config, OptimizerConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.machine.batch_reader import BatchReader
from gptlite.machine.mesh import check_rows, make_mesh
from gptlite.models.gpt import GPT
from gptlite.nn.stack import unstacked
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.sharding import AXES
from gptlite.text.batches import Batches
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus
from gptlite.training import fit as fit_module, step as step_module
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import DivergenceError, Position, fit
from gptlite.training.step import TrainSteps

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
CONFIG = Config(
    model=TINY,
    optimizer=OptimizerConfig(name="adamw", learning_rate=0.01),  # Muon takes longer to compile
    training=TrainingConfig(
        steps=45, batch_size=8, log_every=10, eval_every=25, compute_dtype="float32"
    ),
)


def new_model(config: Config = CONFIG) -> GPT:
    return eqx.filter_jit(GPT)(config.model, TOKENIZER.vocab_size, key=jax.random.key(0))


def steps_of(config: Config, model: GPT | None = None, mesh: Mesh | None = None) -> TrainSteps:
    model = new_model(config) if model is None else model
    mesh = make_mesh() if mesh is None else mesh
    return TrainSteps(model, config.optimizer, config.training, mesh)


def batches_of(config: Config, split=SPLIT) -> Batches:
    training = config.training
    return Batches(split.train, training.batch_size, config.model.context_length, training.seed)


def test_a_function_may_fill_the_same_arrays_again():
    """It is called ahead of the steps."""
    batches, shared = batches_of(CONFIG), np.empty_like(batches_of(CONFIG)(0))

    def refill(step):
        shared[:] = batches(step)
        return shared

    with contextlib.closing(BatchReader(refill, steps_of(CONFIG))) as read:
        first = read.first(0)
        found = read(0, 5)
    np.testing.assert_array_equal(first, batches(0))
    np.testing.assert_array_equal(found[:5], [batches(step) for step in range(5)])


def test_the_batches_of_a_dispatch_take_no_more_than_their_share_of_memory(monkeypatch):
    batches, steps = batches_of(CONFIG), steps_of(CONFIG)
    wanted = run(CONFIG)
    assert steps.capacity(batches(0)) > 2
    monkeypatch.setattr(step_module, "MAX_BYTES", 2 * batches(0).nbytes)
    assert steps.capacity(batches(0)) == 2
    with contextlib.closing(BatchReader(batches, steps)) as read:
        read.first(0)
        assert len(read(0, 2)) == 2
    monkeypatch.setattr(step_module, "MAX_BYTES", 1)
    assert steps.capacity(batches(0)) == 1
    for found, expected in zip(run(CONFIG)[1], wanted[1], strict=True):
        np.testing.assert_array_equal(found, expected)


def arrays_of(state) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]


def run(config: Config, split=SPLIT, model: GPT | None = None, mesh: Mesh | None = None):
    """The lines of metrics of a run, and the last state's arrays."""
    model = new_model(config) if model is None else model
    train_steps = steps_of(config, model, mesh)
    evaluate = Evaluation(split.validation, config.model.context_length, train_steps.mesh)
    lines, arrays = [], []
    for progress in fit(train_steps.init(model), train_steps, batches_of(config, split)):
        val_loss = evaluate.after(progress) if progress.evaluation_due else None
        if progress.log_due:
            lines.append(line_of(progress, val_loss))
        arrays = arrays_of(progress.state)
    return lines, arrays


def line_of(progress, val_loss=None):
    """What does not depend on time."""
    return {
        "step": progress.step,
        "train_loss": progress.train_loss,
        "val_loss": val_loss,
        "learning_rate": progress.learning_rate,
        "grad_norm": progress.grad_norm,
        "skipped": progress.position.skipped,
    }


@pytest.fixture(scope="module")
def finished():
    return run(CONFIG)


def test_it_stops_for_evaluations_and_at_the_end(finished):
    records, _ = finished
    assert [record["step"] for record in records] == [10, 20, 25, 35, 45]
    assert [record["step"] for record in records if record["val_loss"]] == [25, 45]


def test_it_learns(finished):
    records, _ = finished
    assert records[0]["train_loss"] > records[-1]["train_loss"] > 0
    assert records[-1]["val_loss"] < records[-3]["val_loss"] < np.log(TOKENIZER.vocab_size)


def test_a_run_is_a_pure_function_of_its_config(finished):
    records, arrays = run(CONFIG)
    for a, b in zip(arrays, finished[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert [r["train_loss"] for r in records] == [r["train_loss"] for r in finished[0]]


def test_the_length_of_a_dispatch_changes_nothing(finished):
    training = dataclasses.replace(CONFIG.training, log_every=7)
    records, arrays = run(dataclasses.replace(CONFIG, training=training))
    assert [record["step"] for record in records] == [7, 14, 21, 25, 32, 39, 45]
    for a, b in zip(arrays, finished[1], strict=True):
        # Another program, so float32 may round otherwise at each of the 45 steps.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_the_callers_model_is_left_alone():
    model = new_model()
    before = arrays_of(model)
    training = dataclasses.replace(CONFIG.training, steps=3)
    run(dataclasses.replace(CONFIG, training=training), model=model)
    for a, b in zip(before, arrays_of(model), strict=True):
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
    np.testing.assert_array_equal(e.value.batch, batches(1))


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
    train_steps = steps_of(nothing)
    *_, last = fit(train_steps.init(new_model()), train_steps, batches_of(nothing))
    assert last.position.skipped == 45
    assert eqx.tree_equal(last.model, new_model())


def test_skipping_changes_nothing_where_all_is_finite(finished):
    training = dataclasses.replace(CONFIG.training, on_nonfinite="skip")
    records, arrays = run(dataclasses.replace(CONFIG, training=training))
    assert [record["skipped"] for record in records] == [0] * 5
    for a, b in zip(arrays, finished[1], strict=True):
        # Another program, which may round otherwise.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_validation_loss_that_is_not_finite_ends_the_run():
    """The last update ruins the weights after the last training loss was computed."""
    training = dataclasses.replace(CONFIG.training, steps=1)
    config = dataclasses.replace(CONFIG, optimizer=EXPLODING, training=training)
    with pytest.raises(DivergenceError, match=r"at step 1: val_loss nan"):
        run(config)


def test_the_length_of_dispatches_does_not_change_the_result(finished, monkeypatch):
    """Neither the numbers, nor the lines of metrics."""
    monkeypatch.setattr(fit_module, "SECONDS_PER_DISPATCH", 0.0)
    train_steps = steps_of(CONFIG)
    lines, pending = [], []
    for progress in fit(train_steps.init(new_model()), train_steps, batches_of(CONFIG)):
        pending.append(len(progress.position.losses))
        if progress.log_due:
            lines.append(line_of(progress))
    assert pending[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(pending) == 45
    assert lines == [record | {"val_loss": None} for record in finished[0]]


def test_fit_continues_from_a_position(finished, monkeypatch):
    """In the middle of a line of metrics."""
    monkeypatch.setattr(fit_module, "SECONDS_PER_DISPATCH", 0.0)
    train_steps = steps_of(CONFIG)
    at, state = Position(), train_steps.init(new_model())
    for progress in fit(state, train_steps, batches_of(CONFIG)):
        if progress.step == 13:
            at, state = progress.position, jax.tree.map(copied, progress.state)
            break
    lines, arrays = [], []
    for progress in fit(state, train_steps, batches_of(CONFIG), start=at):
        if progress.log_due:
            lines.append(line_of(progress))
        arrays = arrays_of(progress.state)
    assert lines == [record | {"val_loss": None} for record in finished[0][1:]]
    for a, b in zip(arrays, finished[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_number_of_steps_may_change_on_the_way(finished):
    """As if the run had been resumed with another number of them."""
    train_steps = steps_of(CONFIG)
    at, state = Position(), train_steps.init(new_model())
    arrays, due = [], []
    for progress in fit(state, train_steps, batches_of(CONFIG)):
        if progress.step == 25:
            at, state = progress.position, jax.tree.map(copied, progress.state)
            train_steps.steps = 40
        arrays = arrays_of(progress.state)
        due += [progress.step] if progress.evaluation_due else []
    assert due == [25, 40]
    shorter = dataclasses.replace(CONFIG.training, steps=40)
    resumed = steps_of(dataclasses.replace(CONFIG, training=shorter))
    *_, last = fit(state, resumed, batches_of(CONFIG), start=at)
    for a, b, longer in zip(arrays, arrays_of(last.state), finished[1], strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.any(a != longer)


def copied(x):
    return x.copy() if eqx.is_array(x) else x


def test_long_dispatches_are_read_to_their_end(monkeypatch):
    """Longer than what is read ahead."""
    training = dataclasses.replace(CONFIG.training, steps=300, log_every=150, eval_every=300)
    train_steps = steps_of(dataclasses.replace(CONFIG, training=training))
    *_, last = fit(train_steps.init(new_model()), train_steps, batches_of(CONFIG))
    assert last.step == 300


@pytest.mark.parametrize("first", [0, -500])
def test_text_of_another_tokenizer_is_refused(first):
    train_steps = steps_of(CONFIG)
    batches = Batches(np.arange(first, first + 500, dtype=np.int32), 8, 12, 0)
    with pytest.raises(UserError, match=r"from 0 to \d+, the model's vocabulary, got -?\d+"):
        fit(train_steps.init(new_model()), train_steps, batches)


def test_a_state_of_another_step_is_refused():
    train_steps = steps_of(CONFIG)
    with pytest.raises(UserError, match="state is of step 0, and training is to continue at 10"):
        fit(train_steps.init(new_model()), train_steps, batches_of(CONFIG), start=Position(step=10))


def test_muon_refuses_a_model_without_a_stack():
    """It would train by Adam alone, and nobody would be told."""
    muon = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name="muon"))
    with pytest.raises(UserError, match=r"use adamw, or a model that has not been unstacked"):
        steps_of(muon, unstacked(new_model()))
    steps_of(CONFIG, unstacked(new_model()))


def test_two_devices_do_what_one_does(finished):
    assert jax.device_count() == 2
    alone, _ = run(CONFIG, mesh=make_mesh(devices=jax.devices()[:1]))
    for name in ("train_loss", "val_loss"):
        # The same sums in another order, 45 steps long.
        assert alone[-1][name] == pytest.approx(finished[0][-1][name], rel=1e-3)


def test_devices_that_cannot_share_the_batch_are_named():
    with pytest.raises(UserError, match="multiple of the 3 devices that share it, got 8"):
        check_rows(jax.sharding.AbstractMesh((3, 1, 1), AXES), 8)


def test_a_text_in_a_file_trains_like_one_in_memory(finished, tmp_path):
    split = split_corpus(text_corpus(TEXT), TOKENIZER, folder=tmp_path, in_memory=0)
    assert isinstance(split.train, np.memmap)
    records, arrays = run(CONFIG, split)
    assert records == finished[0]
    for a, b in zip(arrays, finished[1], strict=True):
        np.testing.assert_array_equal(a, b)
