"""Run folders and their checkpoints: what is saved comes back, what is damaged is named."""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import equinox as eqx
import jax
import msgspec
import numpy as np
import pytest
from conftest import TEXT, TINY, drawn
from support.kill_loop import metrics as lines, put_arrays

from gptlite.config import Config, OptimizerConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.machine.mesh import make_mesh
from gptlite.models.gpt import GPT
from gptlite.runs import checkpoints as checkpoints_module, folder
from gptlite.runs.checkpoints import Checkpoint, Record, restore
from gptlite.runs.ending import Ending
from gptlite.runs.find import checkpoint_of, list_steps
from gptlite.runs.folder import RunFolder
from gptlite.runs.load import load
from gptlite.runs.metrics_log import MetricsLog
from gptlite.runs.resume import bring_back, find_checkpoint
from gptlite.runs.saved_config import load_config
from gptlite.runs.saving import Checkpoints, Saver
from gptlite.runs.stored import Evaluated, best_step
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.runs.weights import named_arrays
from gptlite.text.batches import Batches
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus
from gptlite.training import fit as fit_module
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import Position, fit
from gptlite.training.step import TrainState, TrainSteps

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
CORPUS = "the text's"
CONFIG = Config(
    model=TINY,
    optimizer=OptimizerConfig(name="adamw", learning_rate=0.01),  # Muon takes longer to compile
    training=TrainingConfig(
        steps=60, batch_size=4, log_every=5, eval_every=20, save_seconds=0.0, keep=3
    ),
)
MODEL = drawn(lambda key: GPT(CONFIG.model, TOKENIZER.vocab_size, key=key))
MESH = make_mesh()
EVALUATE = Evaluation(SPLIT.validation, TINY.context_length, MESH)
BATCHES = Batches(SPLIT.train, 4, TINY.context_length, 0)


@pytest.fixture(scope="module", autouse=True)
def one_step_a_dispatch():
    """So that a run can be stopped, and is saved, at any step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "SECONDS_PER_DISPATCH", 0.0)
        yield


def longer(steps: int) -> Config:
    return dataclasses.replace(CONFIG, training=dataclasses.replace(CONFIG.training, steps=steps))


@functools.cache
def steps_of(config: Config) -> TrainSteps:
    return TrainSteps(MODEL, config.optimizer, config.training, MESH)


@functools.cache
def abstract_state() -> TrainState:
    return steps_of(CONFIG).init(MODEL)


class Training:
    """A run that is trained."""

    def __init__(self, run: RunFolder, config: Config = CONFIG, record: Record | None = None):
        """Makes the folder, or brings it back to the checkpoint with `record`."""
        if record is None:
            run.create(config, TOKENIZER, overwrite=False)
        else:
            bring_back(run, record.position.step, config)
        self.metrics = MetricsLog(run, config, time.perf_counter(), record)
        self.saver = Saver(run, config, CORPUS, 7, record)
        self.ending = Ending(run, self.saver, config, ["--log.to", "wandb"])


def train(
    run: RunFolder,
    config: Config = CONFIG,
    checkpoint: Checkpoint | None = None,
    until: int = 60,
    seen=None,
    every=1000,
) -> dict[str, np.ndarray]:
    """Train until a step, saving every so many and at evaluations; the arrays of the state then.
    Into `seen`: those of every step."""
    train_steps = steps_of(config)
    if checkpoint is None:
        fitting = fit(train_steps.init(MODEL), train_steps, BATCHES)
        training = Training(run, config)
    else:
        start = checkpoint.record.position
        fitting = fit(checkpoint.state, train_steps, BATCHES, start=start)
        training = Training(run, config, checkpoint.record)
    arrays = {}
    with training.saver, training.ending.training_errors(TOKENIZER):
        for progress in fitting:
            val_loss = EVALUATE.after(progress) if progress.evaluation_due else None
            if progress.log_due:
                training.metrics.add(progress, val_loss)
            if val_loss is not None or progress.step == until or progress.step % every == 0:
                training.saver.save(progress, training.metrics)
            arrays = {name: x.copy() for name, x in named_arrays(progress.state).items()}
            if seen is not None:
                seen[progress.step] = arrays
            if progress.step >= until:
                break
    return arrays


def find(run: RunFolder, steps: int) -> Checkpoint:
    """What the run is resumed from, to be trained up to `steps`."""
    run.open()
    return find_checkpoint(run.path, abstract_state(), longer(steps), CORPUS)


def read(path: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint of the run at `path`."""
    return named_arrays(restore(checkpoint_of(path, step), abstract_state()).state)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run that nothing happened to, and its last arrays."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    with RunFolder(path) as run:
        arrays = train(run, every=29)
    return path, arrays


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def test_a_checkpoint_holds_the_state_at_the_time_of_the_save(tmp_path):
    seen: dict[int, dict[str, np.ndarray]] = {}
    training = dataclasses.replace(CONFIG.training, keep=6)
    with RunFolder(tmp_path / "run") as run:
        train(run, dataclasses.replace(CONFIG, training=training), until=6, seen=seen, every=1)
    assert list_steps(tmp_path / "run") == list(range(6, 0, -1))
    for step, arrays in seen.items():
        assert same(read(tmp_path / "run", step), arrays)
    assert sum(name.startswith("optimizer_state") for name in seen[6]) > 10


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    """On a tie, the later evaluation is the best."""
    seen: dict[int, dict[str, np.ndarray]] = {}
    val_losses = {20: 2.0, 40: 1.5, 60: 1.5, 80: 1.6}
    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "after", lambda self, progress: val_losses[progress.step])
        with RunFolder(path) as run:
            train(run, longer(80), until=80, seen=seen, every=5)
    assert list_steps(path) == [80, 75, 70, 60]
    kept: list[tuple[Literal["best", "last"], int]] = [("best", 60), ("last", 80)]
    for which, step in kept:
        weights = named_arrays(load(path, which).model)
        model = {k.removeprefix("model."): v for k, v in seen[step].items() if "optim" not in k}
        model.pop("step")
        assert same(weights, model)
    assert best_step(path) == Evaluated(60, 1.5)


@pytest.mark.parametrize("steps", [(23,), (20, 41), (1, 2, 59)])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(finished, steps, tmp_path):
    path, config = tmp_path / "cut", CONFIG
    with RunFolder(path) as run:
        train(run, until=steps[0])
    arrays = {}
    for until in (*steps[1:], 60):
        with RunFolder(path) as run:
            arrays = train(run, config, find(run, 60), until)
    assert same(arrays, finished[1])
    assert lines(path) == lines(finished[0])
    assert best_step(path) == best_step(finished[0])


def test_resuming_removes_metrics_after_the_checkpoint(copied, finished):
    shutil.rmtree(copied / "checkpoints" / "60")
    shutil.rmtree(copied / "checkpoints" / "58")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 65, "half a li')
    with RunFolder(copied) as run:
        arrays = train(run, checkpoint=find(run, 60))
    assert same(arrays, finished[1])
    assert lines(copied) == lines(finished[0])


def test_a_finished_run_is_extended_and_nothing_else(copied, finished):
    with RunFolder(copied) as run:
        (copied / "result.json").write_text("{}")
        with pytest.raises(UserError, match=r"has done 60 steps; .* above that, got 60"):
            find(run, 60)
        with pytest.raises(UserError, match="got 40"):
            find(run, 40)
        config = longer(80)
        train(run, config, find(run, 80), 80)
    assert [line["step"] for line in lines(copied)] == [*range(5, 85, 5)]
    assert lines(copied)[:12] == lines(finished[0])
    assert load_config(copied / "config.json") == config


# -- damage ------------------------------------------------------------------------------------


def inspect(path: Path) -> tuple[int, dict[str, np.ndarray], str]:
    """From where the run would be resumed: step and arrays; and what was logged."""
    load_config(path / "config.json")
    with RunFolder(path) as run, contextlib.redirect_stdout(io.StringIO()) as logged:
        checkpoint = find(run, 1000)
    return checkpoint.record.position.step, named_arrays(checkpoint.state), logged.getvalue()


CASES_PER_FILE = 6  # of each kind


@pytest.mark.processes
def test_no_damage_of_a_checkpoint_goes_unnoticed(copied, finished):
    """Every file of it, gone, cut at random places, and with a random bit flipped: either the
    arrays are those that were saved, or an older checkpoint is taken, and that is said."""
    chance = random.Random(0)
    older = {step: read(finished[0], step) for step in list_steps(finished[0])}
    newest = copied / "checkpoints" / "60"
    cases, noticed = 0, 0
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        file.unlink()
        step, arrays, _ = inspect(copied)
        assert same(arrays, older[step]), file
        # Of a dozen files or more, some are never read: descriptions for Orbax itself, and nodes of
        # a tree that it leaves behind.
        is_read = step < 60
        for case in range(2 * CASES_PER_FILE if whole else 0):
            damaged = bytearray(whole)
            if case % 2:
                damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            else:
                del damaged[chance.randrange(len(whole)) :]
            file.write_bytes(damaged)
            step, arrays, logged = inspect(copied)
            assert same(arrays, older[step]), file
            assert (step < 60) == ("older checkpoint" in logged)
            cases += is_read
            noticed += step < 60
        file.write_bytes(whole)
    assert cases >= 36
    assert noticed > cases / 2
    step, arrays, _ = inspect(copied)
    assert step == 60
    assert same(arrays, finished[1])


def test_a_record_that_was_edited_is_damaged(copied):
    path = copied / "checkpoints" / "60" / "record" / "metadata"
    record = json.loads(path.read_text())
    record["last"]["val_loss"] -= 1
    path.write_text(json.dumps(record))
    step, _, logged = inspect(copied)
    assert step == 58
    assert "60 is damaged: its digest does not match" in logged


NORM = "model.norm.weight"


def test_a_damaged_checkpoint_is_set_aside_and_made_anew(copied, finished):
    (copied / "checkpoints" / "60" / "state" / NORM / ".zarray").unlink()
    with RunFolder(copied) as run:
        arrays = train(run, checkpoint=find(run, 60))
    assert same(arrays, finished[1])
    assert (copied / "damaged" / "60").is_dir()
    assert list_steps(copied)[0] == 60


def test_a_best_checkpoint_that_is_deleted_is_followed_by_the_next_best(copied):
    best = best_step(copied)
    assert best is not None
    shutil.rmtree(checkpoint_of(copied, best.step))
    left = best_step(copied)
    assert left is not None
    assert left.step < best.step
    assert left.val_loss > best.val_loss
    load(copied)


def test_a_run_without_a_whole_checkpoint_is_refused(copied):
    steps = list_steps(copied)
    for step in steps:
        (copied / "checkpoints" / str(step) / "state" / NORM / ".zarray").unlink()
    with pytest.raises(UserError, match=r"No checkpoint in .* can be used"):
        inspect(copied)
    # Never written to their end: nothing is damaged.
    for step in steps:
        path = copied / "checkpoints" / str(step)
        path.rename(path.with_name(f"{step}.orbax-checkpoint-tmp"))
    with pytest.raises(UserError, match=r"no checkpoint in .* yet.*--overwrite"):
        inspect(copied)


def test_what_cannot_be_read_is_damaged(copied):
    path = copied / "checkpoints" / "60" / "state" / NORM / ".zarray"
    path.write_bytes(b"\xff" * 100)
    step, _, logged = inspect(copied)
    assert step == 58
    assert "60 cannot be read" in logged
    path.unlink()
    path.mkdir()
    step, _, logged = inspect(copied)
    assert step == 58
    assert "60 is damaged: there is no file" in logged


def test_resuming_with_another_text_is_refused(copied):
    with RunFolder(copied) as run:
        run.open()
        with pytest.raises(UserError, match="not the text that this run was trained on"):
            find_checkpoint(copied, abstract_state(), longer(1000), "another's")


def test_what_a_command_asked_for_is_in_the_hint_and_what_a_device_counts_in_the_metrics(
    tmp_path, monkeypatch
):
    counted = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 7, "bytes_in_use": 5})
    with RunFolder(tmp_path / "run") as run:
        training = Training(run)
        progress = next(fit(steps_of(CONFIG).init(MODEL), steps_of(CONFIG), BATCHES))
        training.metrics.add(progress, None)
        assert "peak_device_bytes" not in training.metrics.last  # a CPU does not
        with training.saver as saver:
            saver.save(progress, training.metrics)
            saver.wait()
        assert "--resume" in training.ending.resume_hint()
        assert "--log.to wandb" in training.ending.resume_hint()
        monkeypatch.setattr(jax, "local_devices", lambda: [counted])
        training.metrics.add(progress, None)
    assert training.metrics.last["peak_device_bytes"] == 7


def test_metrics_may_be_deleted(copied, capsys):
    (copied / "metrics.jsonl").unlink()
    shutil.rmtree(copied / "checkpoints" / "60")
    with RunFolder(copied) as run:
        train(run, checkpoint=find(run, 60))
    assert "metrics.jsonl is missing. A new one is started." in capsys.readouterr().out
    assert [line["step"] for line in lines(copied)] == [60]


def test_a_checkpoint_is_restored_onto_another_mesh(finished):
    """The same numbers, wherever they lie."""
    mesh = make_mesh(fsdp=2)
    train_steps = TrainSteps(MODEL, CONFIG.optimizer, CONFIG.training, mesh)
    state = restore(checkpoint_of(finished[0], 60), train_steps.init(MODEL)).state
    assert same(named_arrays(state), finished[1])
    weight = state.model.stack.blocks.mlp.up.weight
    assert weight.addressable_shards[0].data.shape == (1, 64, 8)


# -- folders from others -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "checkpoints/60/state/x", "new"])
def test_a_link_in_the_folder_is_refused(copied, name, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    path = copied / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(outside if "." not in name else outside / "mine")
    with pytest.raises(UserError, match="is a link"):
        inspect(copied)
    assert [file.name for file in outside.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": np.ones((40, 40), np.float32)}, r"norm.weight is .*40, 40"),
        ({"model.norm.weight": np.ones(16, np.int32)}, r"norm.weight is .*int32"),
        ({"model.extra": np.ones(1)}, r"hold model.extra, which the config has no room for"),
    ],
)
def test_arrays_of_another_config_are_refused_before_they_are_read(
    copied, finished, change, words, monkeypatch
):
    put_arrays(copied / "checkpoints" / "60" / "state", finished[1] | change)
    monkeypatch.setattr(checkpoints_module, "_on_devices", None)
    with pytest.raises(UserError, match=words):
        restore(checkpoint_of(copied, 60), abstract_state())


@pytest.mark.parametrize(
    "record", [{}, [], {"position": 3}, {"position": {}, "last": 3}, {"position": {"x": 1}}]
)
def test_a_record_of_something_else_is_refused(copied, record):
    (copied / "checkpoints" / "60" / "record" / "metadata").write_text(json.dumps(record))
    step, _, logged = inspect(copied)
    assert step == 58
    assert "older checkpoint" in logged


# -- locks, and folders that cannot be written -----------------------------------------------------


@pytest.mark.processes
def test_a_second_process_is_refused_until_the_first_is_gone(copied):
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from gptlite.runs.folder import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1])); run.lock(); print('locked', flush=True)\n"
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, copied], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    before = sorted(copied.rglob("*"))
    with RunFolder(copied) as run:
        with pytest.raises(UserError, match="being trained by another process"):
            find(run, 1000)
        with pytest.raises(UserError, match="being trained by another process"):
            run.create(CONFIG, TOKENIZER, overwrite=True)
    assert sorted(copied.rglob("*")) == before
    # However the folder is named.
    alias = copied.parent / "alias"
    alias.symlink_to(copied.name)
    for name in (alias, copied / "checkpoints" / ".."):
        with RunFolder(name) as run, pytest.raises(UserError, match="another process"):
            find(run, 1000)
    alias.unlink()
    holder.kill()
    holder.wait()
    assert inspect(copied)[0] == 60


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_run_stopped_before_its_last_evaluation_is_not_resumed_at_its_end(evaluated, tmp_path):
    with RunFolder(tmp_path / "run") as run:
        train(run, until=20 if evaluated else 17)
        step = list_steps(run.path)[0]
    with RunFolder(tmp_path / "run") as run:
        if evaluated:  # stopped before its result was written
            assert find(run, step).record.position.step == 20
        else:
            with pytest.raises(UserError, match=f"has done 17 steps; .* got {step}"):
                find(run, step)


def test_an_extended_run_has_no_old_result(copied):
    (copied / "result.json").write_text("{}")
    with RunFolder(copied) as run:
        train(run, longer(80), find(run, 80), 80)
    assert not (copied / "result.json").exists()
    with RunFolder(copied) as run:  # so it can still be brought to its end
        assert find(run, 80).record.position.step == 80


def visible(folder: Path) -> list[str]:
    """What is in a folder, without lock files."""
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_a_run_is_not_overwritten_unasked(copied):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with RunFolder(copied) as run, pytest.raises(UserError, match="--overwrite"):
        run.create(CONFIG, TOKENIZER, overwrite=False)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    with RunFolder(copied) as run:
        run.create(CONFIG, TOKENIZER, overwrite=True)
    assert sorted(path.name for path in copied.iterdir()) == ["config.json", "tokenizer.json"]
    assert visible(copied.parent) == ["copy"]


def test_a_link_to_a_run_is_replaced_again_and_again(copied):
    link = copied.parent / "link"
    link.symlink_to(copied)
    for _ in range(3):
        with RunFolder(link) as run:
            run.create(CONFIG, TOKENIZER, overwrite=True)
        assert not link.is_symlink()
        assert sorted(visible(copied.parent)) == ["copy", "link"]
    assert best_step(copied) is not None


def test_a_failed_create_keeps_the_old_run(copied, monkeypatch):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "save_config", full)
    for path in (copied, copied.parent / "other"):
        with RunFolder(path) as run, pytest.raises(UserError, match="No space left"):
            run.create(CONFIG, TOKENIZER, overwrite=True)
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before
    assert visible(copied.parent) == ["copy"]


def test_what_is_no_run_is_not_overwritten_even_when_asked(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with RunFolder(tmp_path / "thesis") as run, pytest.raises(UserError, match="not a run"):
        run.create(CONFIG, TOKENIZER, overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("not a folder")
    with RunFolder(tmp_path / "runs" / "one") as run, pytest.raises(UserError, match="runs/one"):
        run.create(CONFIG, TOKENIZER, overwrite=False)


@pytest.mark.parametrize("when", ["logging", "saving"])
def test_a_folder_that_is_deleted_under_the_run_ends_it(when, tmp_path):
    path = tmp_path / "gone"

    def train_on():
        with RunFolder(path) as run:
            train_steps = steps_of(CONFIG)
            fitting = fit(train_steps.init(MODEL), train_steps, BATCHES)
            training = Training(run)
            with training.saver as saver, training.ending.training_errors(TOKENIZER):
                for progress in fitting:
                    if progress.step > 6:
                        shutil.rmtree(path, ignore_errors=True)
                    if when == "logging" and progress.log_due:
                        training.metrics.add(progress, None)
                    if when == "saving":
                        saver.save(progress, training.metrics)

    with pytest.raises(UserError, match=r"gone was deleted while it was trained"):
        train_on()


def test_a_mask_of_minus_infinity_is_kept_and_nan_is_not(tmp_path):
    """A custom block may have such a constant."""
    state = abstract_state()
    masked = state.model.norm.weight.at[0].set(-np.inf)
    state = eqx.tree_at(lambda s: s.model.norm.weight, state, masked)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    record = Record({}, 7, Position(1), 1.0, CORPUS, "", "2 x cpu")
    with contextlib.closing(checkpoints):
        checkpoints.save(state, record)
        checkpoints.wait()
        found = restore(checkpoint_of(tmp_path, 1), abstract_state())
        np.testing.assert_array_equal(found.state.model.norm.weight, masked)
        broken = eqx.tree_at(lambda s: s.model.norm.weight, state, masked * 0)
        with pytest.raises(UserError, match=r"model\.norm\.weight is NaN"):
            checkpoints.save(broken, msgspec.structs.replace(record, position=Position(2)))


AT = {"step": 1, "losses": [], "skipped": 0, "step_seconds": 1.0}
LAST = {"step": 1.0, "tokens": 8.0, "step_seconds": 1.0, "val_loss": 1.0}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("seconds", "1", r"Expected `float`, got `str` - at `\$\.seconds`"),
        ("seconds", math.nan, r"`float` >= 0.0 - at `\$\.seconds`"),
        ("seconds", -1.0, r"`float` >= 0.0 - at `\$\.seconds`"),
        ("seconds", 10**400, r"at `\$\.seconds`|out of range"),
        ("devices", "2 x cpu\nerror: run this", "its devices are '2 x cpu"),
        ("devices", 3, r"Expected `str`, got `int` - at `\$\.devices`"),
        ("last", {"step": "../.."}, r"Expected `int \| float \| null`, got `str` - at `\$\.last"),
        ("last", {"val_loss": 1.0}, "its last line of metrics is not complete"),
        ("last", LAST | {"val_loss": None}, "its last line of metrics is not complete"),
        ("last", LAST | {"step_seconds": 1e-300}, "its last line of metrics is not complete"),
        ("position", AT | {"skipped": -(10**30)}, "a number is negative"),
        ("position", AT | {"step_seconds": -1.0}, "a number is negative"),
        ("position", AT | {"skipped": 2}, "a number is negative, or more updates were skipped"),
        ("position", AT | {"losses": [1e308]}, r"`float` <= 1e\+39"),
        (
            "position",
            {"step": True, "losses": []},
            r"Expected `int`, got `bool` - at `\$\.position\.step`",
        ),
        ("position", {"losses": ["a"]}, r"Expected `float`, got `str` - at `\$\.position\.losses"),
        ("position", [], r"Expected `object`, got `array` - at `\$\.position`"),
    ],
)
def test_a_record_from_a_stranger_has_its_types(tmp_path, field, value, words):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    record = Record({}, 7, Position(1), 1.0, CORPUS, "", "2 x cpu")
    with contextlib.closing(checkpoints), pytest.MonkeyPatch.context() as patch:
        to_builtins = msgspec.to_builtins
        change = {field: value}
        patch.setattr(msgspec, "to_builtins", lambda x: to_builtins(x) | change)
        checkpoints.save(abstract_state(), record)
        checkpoints.wait()
        with pytest.raises(UserError, match=f"checkpoints/1 is damaged: .*{words}"):
            restore(checkpoint_of(tmp_path, 1), abstract_state())


def test_an_array_in_chunks_larger_than_itself_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    with contextlib.closing(checkpoints):
        checkpoints.save(abstract_state(), Record({}, 7, Position(1), 1.0, CORPUS, "", "2 x cpu"))
        checkpoints.wait()
    file = tmp_path / "checkpoints" / "1" / "state" / "model.embedding.weight" / ".zarray"
    metadata = json.loads(file.read_text())
    metadata["chunks"][0] = 2**16
    file.write_text(json.dumps(metadata))
    with pytest.raises(UserError, match=r"in chunks of \[65536,"):
        restore(checkpoint_of(tmp_path, 1), abstract_state())


def test_metrics_with_another_name_outside_of_the_run_are_left_alone(copied, finished, tmp_path):
    """A hard link: a backup, or the work of a stranger."""
    os.link(copied / "metrics.jsonl", tmp_path / "backup")
    before = (tmp_path / "backup").read_bytes()
    with RunFolder(copied) as run:
        train(run, longer(70), find(run, 70), 70)
    assert (tmp_path / "backup").read_bytes() == before
    assert (copied / "metrics.jsonl").read_bytes() != before


def test_what_is_no_line_of_metrics_is_removed(copied, finished):
    whole = (copied / "metrics.jsonl").read_bytes()
    bad = [b"1\n", b'{"step": 1e999, "train_loss": 1.0}\n', b"x" * 10_000 + b"\n"]
    bad += [b'{"step": 5, "train_loss": %s}\n' % loss for loss in (b"1e308", b"9" * 400, b"{}")]
    bad += [
        b'{"step": 5, "train_loss": 1, "val_loss": null}\n',
        b'{"step": 5, "train_loss": 1, "\xff": 1}\n',
    ]
    lines = whole.splitlines(keepends=True)
    mixed = b"".join([*bad, *lines[:2], *bad, lines[1], *lines[2:], b'{"step": '])
    (copied / "metrics.jsonl").write_bytes(mixed)
    with RunFolder(copied) as run:
        training = Training(run, longer(70), find(run, 70).record)
        assert (copied / "metrics.jsonl").read_bytes() == whole
        names = ("step", "train_loss", "val_loss")
        records = map(json.loads, lines)
        expected = [[record.get(name, msgspec.UNSET) for name in names] for record in records]
        assert [
            [getattr(line, name) for name in names] for line in training.metrics.lines()
        ] == expected


def test_metrics_without_an_end_are_not_read_to_it(copied, finished):
    """A sparse file: a terabyte of zeros, which takes no room."""
    whole = (copied / "metrics.jsonl").read_bytes()
    os.truncate(copied / "metrics.jsonl", 2**40)
    with RunFolder(copied) as run:
        bring_back(run, find(run, 70).record.position.step, longer(70))
        assert (copied / "metrics.jsonl").read_bytes() == whole


def test_a_huge_file_in_another_checkpoint_is_refused(copied):
    """Orbax reads it whole."""
    (copied / "checkpoints" / "58" / "metrics").mkdir()
    (copied / "checkpoints" / "58" / "metrics" / "metrics").touch()
    os.truncate(copied / "checkpoints" / "58" / "metrics" / "metrics", 2**40)
    with RunFolder(copied) as run, pytest.raises(UserError, match=r"metrics is no file .*1,099,"):
        find(run, 1000)


@pytest.mark.parametrize("damaged", [f"state/{NORM}/.zarray", "record/metadata"])
def test_a_best_checkpoint_that_is_damaged_is_set_aside(copied, damaged, capsys):
    """The best weights are then those of an evaluation that can be read."""
    path = copied / "checkpoints" / "40" / "record" / "metadata"
    record = json.loads(path.read_text())
    record["last"]["val_loss"] = 0.5
    path.write_text(json.dumps(record))
    best = best_step(copied)
    assert best is not None
    assert best.step == 40
    (copied / "checkpoints" / "40" / damaged).unlink()
    with RunFolder(copied) as run:
        train(run, longer(80), find(run, 80), 80)
    assert "checkpoints/40 is damaged" in capsys.readouterr().out
    assert (copied / "damaged" / "40").is_dir()
    best = best_step(copied)
    assert best is not None
    assert best.step in (60, 80)


@pytest.mark.parametrize("name", ["a[b]", "a\\b"])
def test_a_place_where_orbax_would_lose_files_is_refused(copied, name):
    path = Path(shutil.copytree(copied, copied.parent / name))
    with RunFolder(path) as run, pytest.raises(UserError, match="must be without"):
        run.create(CONFIG, TOKENIZER, overwrite=True)
    with RunFolder(path) as run, pytest.raises(UserError, match="must be without"):
        run.open()
    assert best_step(path) is not None
    if "[" in name:
        load(path)
    else:
        with pytest.raises(UserError, match="takes a backslash for a slash"):
            load(path)


def test_a_checkpoint_with_a_huge_file_is_refused(tmp_path):
    """TensorStore would end the process."""
    with RunFolder(tmp_path / "one") as run:
        train(run, until=1)
    file = next(path for path in (tmp_path / "one").rglob(".zarray"))
    os.truncate(file, 2**40)
    words = r"zarray is no file .*1,099,511,627,776"
    with pytest.raises(UserError, match=words):
        restore(checkpoint_of(tmp_path / "one", 1), abstract_state())
    with pytest.raises(UserError, match=words):
        load(tmp_path / "one", "last")
