"""Models that were trained in Python, kept as runs."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import TINY, run_script

import gptlite as gl
from gptlite.hugging_face.tokenizer import HFTokenizer, to_hf_tokenizer
from gptlite.text.tokenizer import ByteTokenizer, TiktokenTokenizer, Tokenizer

TEXT = "the cat sat on the mat. " * 50
CORPUS = gl.text_corpus(TEXT)


@pytest.mark.parametrize(
    "tokenizer",
    [gl.make_tokenizer(name, TEXT) for name in ("char", "byte", "bpe:270")]
    + [HFTokenizer(to_hf_tokenizer(ByteTokenizer()))],
    ids=["char", "byte", "bpe", "hf"],
)
def test_a_model_that_was_trained_in_python_is_a_run(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = gl.make_model(TINY, tokenizer, key=jax.random.key(0))
    run = gl.save_run("mine", model, tokenizer, gl.TrainingConfig(steps=7))
    again = gl.load("mine")
    assert eqx.tree_equal(again.model, model)
    assert (again.config, again.path) == (run.config, run.path)
    assert again.tokenizer.to_json() == tokenizer.to_json()
    text = again.generate("the", max_new_tokens=8, seed=3)
    words = ["--run", "mine", "--prompt", "the", "--max-new-tokens", "8", "--seed", "3"]
    assert run_script("sample.py", *words, folder=tmp_path).out == f"{text}\n"
    with pytest.raises(gl.UserError, match="There is a run at runs/mine already"):
        gl.save_run("mine", model, tokenizer)
    assert gl.save_run("mine", model, tokenizer, overwrite=True).config.training.steps == 1200


def test_what_was_frozen_in_training_is_a_part_of_the_run(tmp_path, monkeypatch):
    """And what a call that was killed has left is no obstacle."""
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("char", TEXT)
    model = gl.GPT(TINY, tokenizer.vocab_size, key=jax.random.key(0))
    with monkeypatch.context() as patch:
        patch.setattr("gptlite.runs.save.remove", lambda path: None)
        patch.setattr("gptlite.runs.folder.RunFolder.create", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gl.save_run("mine", model, tokenizer)
    assert Path("runs/.mine.part").exists()
    gl.save_run("mine", model, tokenizer, gl.TrainingConfig(freeze="embedding.*"))
    again = gl.load("mine")
    assert eqx.tree_equal(again.model, model)
    assert gl.save_run("copy", again.model, tokenizer, again.config.training).path.exists()


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_run_that_is_replaced_is_whole_whenever_that_is_stopped(moves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("char", TEXT)
    old, new = (gl.GPT(TINY, tokenizer.vocab_size, key=jax.random.key(i)) for i in range(2))
    gl.save_run("mine", old, tokenizer)
    done, rename = [], Path.rename

    def stopped(path, target):
        if path.name in (".mine.part", "mine", ".mine.new"):
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopped)
        with pytest.raises(KeyboardInterrupt):
            gl.save_run("mine", new, tokenizer, overwrite=True)
    assert eqx.tree_equal(gl.load("mine").model, old)
    gl.save_run("mine", new, tokenizer, overwrite=True)
    assert eqx.tree_equal(gl.load("mine").model, new)


def test_a_checkpoints_record_is_on_the_disk_before_others_are_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synced = []
    monkeypatch.setattr("gptlite.runs.saving.sync", lambda path: synced.append(path.read_bytes()))
    tokenizer = gl.make_tokenizer("char", TEXT)
    run = gl.save_run("mine", gl.GPT(TINY, tokenizer.vocab_size, key=jax.random.key(0)), tokenizer)
    (record,) = run.path.glob("checkpoints/*/record/metadata")
    assert record.read_bytes() in synced


def test_a_run_that_cannot_be_written_replaces_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("char", TEXT)
    model = gl.GPT(TINY, tokenizer.vocab_size, key=jax.random.key(0))
    gl.save_run("mine", model, tokenizer)
    there = sorted(Path("runs").rglob("*"))
    bad = eqx.tree_at(
        lambda m: m.embedding.weight, model, replace_fn=lambda x: x.at[0, 0].set(np.nan)
    )
    for name in ("mine", "other"):
        with pytest.raises(gl.UserError, match=r"not written: model\.embedding\.weight is NaN"):
            gl.save_run(name, bad, tokenizer, overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr("orbax.checkpoint.CheckpointManager.save", lambda *_, **__: 1 / 0)
            with pytest.raises(gl.UserError, match="cannot be written: division by zero"):
                gl.save_run(name, model, tokenizer, overwrite=True)
    assert eqx.tree_equal(gl.load("mine").model, model)
    assert {*Path("runs").rglob("*")} - {*there} == {Path("runs/.other.lock")}


def test_rows_that_the_tokenizer_asks_for_are_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("bpe:270", TEXT)
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.padded_vocab_size > tokenizer.vocab_size
    model = gl.GPT(TINY, tokenizer.vocab_size, key=jax.random.key(0))
    gl.save_run("mine", model, tokenizer)
    again = gl.load("mine").model
    assert again.embedding.weight.shape == (tokenizer.padded_vocab_size, TINY.d_model)
    ids = tokenizer.encode(TEXT[:20])
    # The product with the head has another number of columns.
    np.testing.assert_allclose(again(ids), model(ids), atol=1e-6)


def test_a_run_begins_from_one_with_a_class_of_its_own(tmp_path, monkeypatch):
    class Mine(eqx.Module):
        weight: jax.Array

        def __init__(self, config, *, key):
            self.weight = jax.random.normal(key, (config.d_model, config.d_model))

        def __call__(self, x):
            return x @ self.weight

    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("byte")
    config = dataclasses.replace(TINY, mlp=Mine)
    model = gl.make_model(config, tokenizer, key=jax.random.key(0))
    gl.save_run("mine", model, tokenizer)
    assert eqx.tree_equal(gl.load("mine", custom=[Mine]).model, model)
    with pytest.raises(gl.UserError):
        gl.load("mine")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gl.GPT(TINY, 13, key=jax.random.key(0)), "has 13 ids, and the tokenizer 256"),
        (eqx.nn.Identity, "is of a GPT, got Identity"),
    ],
)
def test_what_is_no_model_for_the_tokenizer_is_refused(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(gl.UserError, match=words):
        gl.save_run("mine", make(), gl.make_tokenizer("byte"))
    with pytest.raises(gl.UserError, match="has a tokenizer, got 'byte'"):
        gl.save_run("mine", gl.GPT(TINY, 13, key=jax.random.key(0)), "byte")  # pyright: ignore
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name", ["", ".", "a/b", "a\nb", "a" * 201, "é" * 101, "\ud800", Path("a")]
)
def test_what_is_no_name_of_a_run_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = gl.make_tokenizer("byte")
    with pytest.raises(gl.UserError, match="--run takes the name of a folder, "):
        gl.save_run(name, gl.make_model(TINY, tokenizer, key=jax.random.key(0)), tokenizer)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", [Path("a.txt"), b"bytes", 3, None])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(gl.UserError, match=r"A text is a string, or a function .* got"):
        gl.text_corpus(text)


def test_texts_and_lists_are_taken_where_a_reader_expects_it():
    tokenizer: Tokenizer = gl.make_tokenizer("char", TEXT)
    assert tokenizer.vocab_size == len(set(TEXT))
    assert list(gl.load_corpus(["a b", "c"]).read(None)) == ["a b", "c"]


def test_an_empty_prompt_begins_a_document_where_there_is_a_token_for_that():
    bpe = gl.make_tokenizer("bpe:270", TEXT)
    assert gl.prompt_ids(bpe, "").tolist() == list(bpe.end_ids)
    with pytest.raises(gl.UserError, match="prompt is empty"):
        gl.prompt_ids(gl.make_tokenizer("byte"), "")


def test_one_sequence_and_both_kinds_of_keys():
    tokenizer = gl.make_tokenizer("byte")
    model = gl.make_model(TINY, tokenizer, key=jax.random.PRNGKey(0))
    prompt = tokenizer.encode("the")
    wanted = gl.generate(model, prompt[None], 5, key=jax.random.key(1))[0]
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        np.testing.assert_array_equal(gl.generate(model, prompt, 5, key=key), wanted)
    keys = jax.random.split(jax.random.PRNGKey(2), 3)
    typed = jax.random.split(jax.random.key(2), 3)
    prompts = np.tile(prompt, (3, 1))
    np.testing.assert_array_equal(
        gl.generate(model, prompts, 5, keys=keys), gl.generate(model, prompts, 5, keys=typed)
    )


def test_the_package_has_a_version():
    assert gl.__version__.count(".") == 2
