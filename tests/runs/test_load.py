"""Reading runs and weights: what is whole is read, what is damaged is named."""

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import safetensors.numpy
from conftest import TEXT, TINY, drawn

from gptlite.config import Config
from gptlite.errors import UserError
from gptlite.machine.files import write_json
from gptlite.models.gpt import GPT
from gptlite.runs import find
from gptlite.runs.load import load_run
from gptlite.runs.saved_config import load_config, save_config
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.runs.weights import (
    Evaluated,
    load_weights,
    named_arrays,
    read_evaluated,
    save_weights,
)
from gptlite.text.corpus import text_corpus

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
CONFIG = Config(model=dataclasses.replace(TINY, n_layers=2))
MODEL = drawn(lambda key: GPT(CONFIG.model, TOKENIZER.vocab_size, key=key))
SAVED = Evaluated(7, 1.5)


def write_run(path: Path) -> Path:
    path.mkdir(parents=True)
    save_config(CONFIG, path / "config.json")
    write_json(path / "tokenizer.json", TOKENIZER.to_json())
    save_weights(path / "best.safetensors", named_arrays(MODEL), SAVED)
    return path


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "runs" / "one")


def test_what_was_saved_is_loaded(run):
    loaded = load_run(run)
    assert loaded.config == CONFIG
    assert loaded.tokenizer.encode(TEXT).tolist() == TOKENIZER.encode(TEXT).tolist()
    saved, again = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (MODEL, loaded.model))
    for a, b in zip(saved, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(loaded.model) == jax.tree.structure(MODEL)


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


def rewrite(path, change):
    arrays = safetensors.numpy.load(path.read_bytes())
    change(arrays)
    path.write_bytes(safetensors.numpy.save(arrays))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "best.safetensors").unlink(), "has no best weights.*Use its last ones"),
        (lambda p: (p / "best.safetensors").write_bytes(b"\x00" * 100), "cannot be read"),
        (
            lambda p: rewrite(p / "best.safetensors", lambda a: a.pop("norm.weight")),
            r"lack norm\.weight",
        ),
        (
            lambda p: rewrite(p / "best.safetensors", lambda a: a.update(extra=np.ones(1))),
            "hold extra",
        ),
        (
            lambda p: rewrite(
                p / "best.safetensors", lambda a: a.update({"norm.weight": np.ones(3, "f4")})
            ),
            r"norm\.weight is float32\[3\] where the config calls for float32\[16\]",
        ),
        (lambda p: (p / "config.json").unlink(), "no config.json"),
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
        load_run(run)


def test_the_newest_run_is_the_one_saved_last(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    other = write_run(tmp_path / "runs" / "two")
    os.utime(run / "best.safetensors", (1, 1))
    assert find.find_run(None) == other
    os.utime(other / "best.safetensors", (0, 0))
    assert find.find_run(None) == run
    (run / "best.safetensors").unlink()
    assert find.find_run(None) == other


def test_the_newest_run_is_one_with_the_weights_that_are_asked_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    not_evaluated = write_run(tmp_path / "runs" / "two")
    (not_evaluated / "best.safetensors").rename(not_evaluated / "last.safetensors")
    assert find.find_run(None, "last") == not_evaluated
    assert find.find_run(None) == run


def test_no_run_yet_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"run `python train\.py` first"):
        find.find_run(None)


def test_weights_know_their_step_and_those_of_other_programs_are_read(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_weights(ours, named_arrays(MODEL), SAVED)
    assert read_evaluated(ours) == SAVED
    assert read_evaluated(tmp_path / "absent") is None
    theirs.write_bytes(safetensors.numpy.save(named_arrays(MODEL)))
    assert eqx.tree_equal(load_weights(theirs, MODEL), MODEL)
    assert read_evaluated(theirs) is None
    ours.write_bytes(ours.read_bytes()[:-1])
    assert read_evaluated(ours) is None
    save_weights(ours, named_arrays(MODEL), Evaluated(7))  # not evaluated
    assert read_evaluated(ours) is None
    with safetensors.safe_open(ours, "numpy") as file:
        assert file.metadata() == {"evaluated": '{"step": 7}'}


@pytest.mark.parametrize(
    "found",
    [
        *('{"step": 1e999, "val_loss": 1}', '{"step": 1, "val_loss": %s}' % ("9" * 400)),
        *('{"step": 1, "val_loss": -1e308}', '{"step": true, "val_loss": 1}', "[]", "[" * 10**5),
    ],
)
def test_what_a_stranger_says_of_his_weights_is_checked(found, tmp_path):
    weights = safetensors.numpy.save({"a": np.ones(1)}, {"evaluated": found})
    (tmp_path / "x").write_bytes(weights)
    assert read_evaluated(tmp_path / "x") is None


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
    ],
)
def test_weights_that_claim_absurd_sizes_allocate_nothing(run, content):
    (run / "best.safetensors").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=r"best\.safetensors cannot be read"):
        load_run(run)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_config_of_absurd_sizes_allocates_nothing(run):
    sizes = {"n_layers": 200, "d_model": 1_000_000, "context_length": 10_000_000}
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(TINY, **sizes))
    save_config(config, run / "config.json")  # 2,400 TB of parameters
    with pytest.raises(UserError, match=r"Loading .* takes 2\d,\d+,\d+\.\d GiB, and"):
        load_run(run)


HOSTILE = {
    "a link": lambda path: path.symlink_to("/etc/hostname"),
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a file with holes": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "best.safetensors"])
def test_only_regular_files_of_a_plausible_size_are_read(run, name, kind):
    (run / name).unlink()
    HOSTILE[kind](run / name)
    with pytest.raises(UserError, match=name):
        load_run(run)


def test_what_a_killed_overwrite_leaves_is_not_the_newest_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "RUNS_FOLDER", tmp_path / "runs")
    os.utime(run / "best.safetensors", (1, 1))
    write_run(tmp_path / "runs" / ".one.old")
    assert find.find_run(None) == run
