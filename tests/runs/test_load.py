"""Reading runs and weights: what is whole is read, what is damaged is named."""

import dataclasses
import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import TEXT, TINY, drawn
from hypothesis import given, strategies as st
from support.kill_loop import arrays, put_arrays
from support.runs import save_checkpoint

from gptlite.config import Config
from gptlite.errors import UserError
from gptlite.machine.files import remove, write_json
from gptlite.models.gpt import GPT
from gptlite.runs import find, load as load_module
from gptlite.runs.find import checkpoint_of
from gptlite.runs.frozen import read_frozen, save_frozen
from gptlite.runs.load import load
from gptlite.runs.saved_config import load_config, save_config
from gptlite.runs.stored import Evaluated, best_step, key_of, name_of
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.runs.weights import named_arrays, named_leaves
from gptlite.text.corpus import text_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
CONFIG = Config(model=dataclasses.replace(TINY, n_layers=2))
MODEL = drawn(lambda key: GPT(CONFIG.model, TOKENIZER.vocab_size, key=key))
SAVED = Evaluated(7, 1.5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    path.mkdir()
    save_config(CONFIG, path / "config.json")
    write_json(path / "tokenizer.json", TOKENIZER.to_json())
    save_checkpoint(path, MODEL, SAVED.step, SAVED.val_loss)
    return path


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "runs" / "one"))


@pytest.mark.parametrize("way", ["../one", "../../runs/./one", "../../link", "../../link/../one"])
def test_a_run_is_loaded_by_any_path_to_it(run, monkeypatch, way):
    (run.parents[1] / "link").symlink_to(run)
    (run.parent / "notebooks").mkdir()
    monkeypatch.chdir(run.parent / "notebooks")
    np.testing.assert_array_equal(load(way).model.norm.weight, MODEL.norm.weight)


def test_what_was_saved_is_loaded(run):
    loaded = load(run)
    assert loaded.config == CONFIG
    assert loaded.tokenizer.encode(TEXT).tolist() == TOKENIZER.encode(TEXT).tolist()
    saved, again = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (MODEL, loaded.model))
    for a, b in zip(saved, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(loaded.model) == jax.tree.structure(MODEL)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "checkpoints/7/record/metadata"])
def test_a_newest_run_that_is_damaged_leaves_a_way_to_another(run, monkeypatch, name):
    monkeypatch.chdir(run.parents[1])
    (run / name).write_text("{")
    way = ". runs/one is the newest run: --run NAME, in Python load(NAME), takes another."
    with pytest.raises(UserError, match=re.escape(way)):
        load()
    with pytest.raises(UserError) as error:  # it was asked for
        load("one")
    assert "takes another" not in str(error.value)


def test_an_edited_config_is_read_and_checked(run):
    path = run / "config.json"
    sections = json.loads(path.read_text())
    sections["training"]["steps"] = 7
    path.write_text(json.dumps(sections))
    assert load_config(path).training.steps == 7
    path.write_text(json.dumps(sections | {"model": []}))
    with pytest.raises(UserError, match="not a readable gptlite config"):
        load_config(path)


def test_names_and_layouts_are_those_of_the_readme():
    arrays = named_arrays(MODEL)
    assert {name: array.shape for name, array in arrays.items()} == {
        "embedding.weight": (TOKENIZER.vocab_size, 16),
        "previous.0.weight": (TOKENIZER.vocab_size, 16),
        "previous.1.weight": (TOKENIZER.vocab_size, 16),
        "stack.blocks.attention_residual.norm.weight": (2, 16),
        "stack.blocks.attention.heads.query.weight": (2, 16, 16),
        "stack.blocks.attention.heads.key.weight": (2, 16, 16),
        "stack.blocks.attention.heads.value.weight": (2, 16, 16),
        "stack.blocks.attention.heads.output.weight": (2, 16, 16),
        "stack.blocks.mlp_residual.norm.weight": (2, 16),
        "stack.blocks.mlp.up.weight": (2, 64, 16),
        "stack.blocks.mlp.down.weight": (2, 16, 64),
        "norm.weight": (16,),
        "head.weight": (TOKENIZER.vocab_size, 16),
    }


def resave(run: Path, change: dict[str, np.ndarray | None]) -> None:
    """Change arrays of the checkpoint. None: leave it out."""
    state = checkpoint_of(run, SAVED.step) / "state"
    changed = arrays(state) | change
    put_arrays(state, {x: a for x, a in changed.items() if a is not None})


NORM = "model.norm.weight"


def description(run: Path, name: str = NORM) -> Path:
    return checkpoint_of(run, SAVED.step) / "state" / name / ".zarray"


def describe(run: Path, name: str = NORM, **change: Any) -> None:
    """Change what is said of an array."""
    file = description(run, name)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: shutil.rmtree(p / "checkpoints"), "no weights yet"),
        (lambda p: (p / "checkpoints" / "7").rename(p / "checkpoints" / "8"), "no best weights"),
        (lambda p: description(p).write_bytes(b"\x00" * 100), "checkpoints/7 cannot be read"),
        (
            lambda p: (shutil.rmtree(folder := description(p).parents[1]), folder.mkdir()),
            "checkpoints/7 is damaged: it holds no arrays",
        ),
        (lambda p: description(p).unlink(), r"7 is damaged: there is no file .*weight/\.zarray"),
        (lambda p: os.truncate(description(p), 2**20 + 1), r"zarray has 1,048,577 bytes: at most"),
        (lambda p: describe(p, compressor={"id": "zstd", "level": 1}), "is packed, by .*zstd"),
        (lambda p: describe(p, compressor={"id": "blosc", "cname": "lz4"}), "is packed, by .*lz4"),
        (lambda p: describe(p, chunks=[1]), r"norm\.weight is in 16 parts, of which \d are there"),
        (lambda p: describe(p, shape=[8]), r"norm\.weight is float32\[8\] where"),
        (lambda p: describe(p, dtype="<f8"), r"norm\.weight is float64\[16\] where"),
        (lambda p: resave(p, {"model.norm.weight": None}), r"lack model\.norm\.weight"),
        (lambda p: resave(p, {"model.extra": np.ones(1)}), r"hold model\.extra"),
        (
            lambda p: resave(p, {"model.norm.weight": np.ones(3, "f4")}),
            r"norm\.weight is float32\[3\] where the config calls for float32\[16\]",
        ),
        (lambda p: (p / "config.json").unlink(), "There is no run "),
        (lambda p: (p / "config.json").write_text("{}"), "not a readable gptlite config"),
        (
            lambda p: (p / "config.json").write_text(
                (p / "config.json").read_text().replace('"n_heads": 2', '"n_heads": 3')
            ),
            "d_model must be a multiple of model.n_heads",
        ),
        (
            lambda p: (p / "config.json").write_text("[" * 100_000),
            "nested too deeply",
        ),
        (lambda p: (p / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "tokenizer.json").write_text("[]"), "Expected `object`, got `array`"),
        (
            lambda p: (p / "tokenizer.json").write_text('{"kind": "byte", "x": 1}'),
            "not a tokenizer",
        ),
    ],
)
def test_a_damaged_run_is_refused_by_name(run, damage, words):
    damage(run)
    with pytest.raises(UserError, match=words):
        load(run)


def test_the_newest_run_is_the_one_saved_last(run, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    other = Path(shutil.copytree(saved, tmp_path / "runs" / "two"))
    for path in (run, other):
        os.utime(checkpoint_of(path, 7), (2, 2))
    os.utime(checkpoint_of(run, 7), (1, 1))
    assert find.find_run(None) == other
    os.utime(checkpoint_of(other, 7), (0, 0))
    assert find.find_run(None) == run
    shutil.rmtree(run / "checkpoints")
    assert find.find_run(None) == other


def test_weights_that_were_not_evaluated_are_the_last_and_not_the_best(run):
    save_checkpoint(run, MODEL, 9, None)
    norm = np.asarray(MODEL.norm.weight)
    changed = eqx.tree_at(lambda model: model.norm.weight, MODEL, norm + 1)
    save_checkpoint(run, changed, 11, None)
    assert best_step(run) == SAVED
    np.testing.assert_array_equal(load(run).model.norm.weight, norm)
    np.testing.assert_array_equal(load(run, "last").model.norm.weight, norm + 1)


@pytest.mark.parametrize("last", [{}, {"step": 5, "train_loss": 2.0}])
def test_a_run_that_was_saved_between_two_lines_of_metrics_has_its_last_weights(run, last, capsys):
    """Before its first evaluation."""
    file = run / "checkpoints" / "7" / "record" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"last": last}))
    norm = np.asarray(MODEL.norm.weight)
    np.testing.assert_array_equal(load(run).model.norm.weight, norm)
    assert "was evaluated: its last weights are used" in capsys.readouterr().out


def test_what_is_no_run_and_no_checkpoint_is_not_the_newest(run, saved, tmp_path, monkeypatch):
    """Whatever lies in the folder of runs."""
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    for name in ("007", "8.part", "x"):
        (tmp_path / "runs" / name / "checkpoints" / "99").mkdir(parents=True)
    odd = run / "checkpoints"
    (odd / "007").mkdir()
    (odd / "12").symlink_to("nowhere")
    (odd / "13").symlink_to("7")
    (odd / "14").touch()
    shutil.copytree(saved, tmp_path / "other")
    (tmp_path / "runs" / "linked").mkdir()
    shutil.copy(run / "config.json", tmp_path / "runs" / "linked")
    (tmp_path / "runs" / "linked" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    assert find.list_steps(run) == [7]
    assert find.find_run(None) == run


def test_a_model_may_have_more_parameters_than_32_bits_count(tmp_path):
    save_checkpoint(tmp_path, MODEL, parameters=3_000_000_000)
    assert best_step(tmp_path) == SAVED


def test_a_part_that_is_missing_is_not_read_as_zeros(run):
    """As when a checkpoint is deleted while it is read."""
    description(run, "model.head.weight").with_name("0.0").unlink()
    with pytest.raises(UserError, match="checkpoints/7 cannot be read"):
        load(run)


@pytest.mark.parametrize("weights", ["best", "last"])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_followed_by_the_next(
    run, weights, monkeypatch
):
    read, paths = load_module.load_model, []

    def load_model(path, *rest):
        paths.append(path.name)
        if path.name == "7":  # training goes on, and keeps one checkpoint
            save_checkpoint(run, MODEL, 9, 1.0)
            shutil.rmtree(path)
        return read(path, *rest)

    monkeypatch.setattr(load_module, "load_model", load_model)
    load(run, weights)
    assert paths == ["7", "9"]


def test_no_run_yet_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"run `gptlite train` first"):
        find.find_run(None)


@pytest.mark.parametrize(
    "last",
    [
        *('{"step": 1e999, "val_loss": 1}', '{"step": 7, "val_loss": %s}' % ("9" * 400)),
        *('{"step": 7, "val_loss": -1e308}', '{"step": true, "val_loss": 1}', "[]", "[" * 10**5),
    ],
)
def test_what_a_stranger_says_of_his_weights_is_checked(run, last):
    path = checkpoint_of(run, 7) / "record" / "metadata"
    record = json.loads(path.read_text()) | {"last": None}
    path.write_text(json.dumps(record).replace('"last": null', f'"last": {last}'))
    assert best_step(run) is None


def test_frozen_parameters_are_those_that_were_saved(tmp_path):
    save_frozen(tmp_path / "x", named_arrays(MODEL))
    again = read_frozen(tmp_path / "x", named_leaves(MODEL))
    for name, array in named_arrays(MODEL).items():
        np.testing.assert_array_equal(again[name], array)


def header(length: int, entry: dict) -> bytes:
    text = json.dumps({"norm.weight": entry}).encode()
    return (length or len(text)).to_bytes(8, "little") + text + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        header(2**63, {}),
        header(0, {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}),
        header(0, {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 64]}),
        header(0, {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 64]}),
        # safetensors takes it for an array of no bytes, and NumPy refuses it.
        header(0, {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]})[:-64],
    ],
)
def test_frozen_parameters_of_absurd_sizes_allocate_nothing(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"x cannot be read"):
        read_frozen(tmp_path / "x", named_leaves(MODEL))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_weights_in_chunks_larger_than_themselves_are_refused(run):
    describe(run, "model.embedding.weight", chunks=[2**16, 2**16])
    with pytest.raises(UserError, match=r"in chunks of \[65536,"):
        load(run)


def test_a_config_of_absurd_sizes_allocates_nothing(run):
    sizes = {"n_layers": 200, "d_model": 1_000_000, "context_length": 10_000_000}
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, **sizes))
    save_config(config, run / "config.json")  # 2,400 TB of parameters
    with pytest.raises(UserError, match=r"Loading .* takes 2\d,\d+,\d+\.\d GiB, and"):
        load(run)


HOSTILE = {
    "a link": lambda path: path.symlink_to("/etc/hostname"),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a file with holes": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


STATE = "checkpoints/7/state"


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", f"{STATE}/{NORM}/.zarray", f"{STATE}/{NORM}"]
)
def test_only_regular_files_of_a_plausible_size_are_read(run, name, kind):
    remove(run / name)
    HOSTILE[kind](run / name)
    with pytest.raises(UserError, match=name.partition("/state")[0]):
        load(run)


def test_what_a_killed_overwrite_leaves_is_not_the_newest_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    os.utime(checkpoint_of(run, 7), (1, 1))
    shutil.copytree(run, tmp_path / "runs" / ".one.old")
    assert find.find_run(None) == run


@given(st.lists(st.text("aAbB^/.é0", min_size=1, max_size=6), max_size=5, unique=True))
def test_arrays_have_folders_that_differ_in_more_than_their_case(names):
    keys = [key_of(name) for name in names]
    assert [name_of(key) for key in keys] == names
    assert len({key.lower() for key in keys}) == len(names)
