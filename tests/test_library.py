"""What a program finds in `gptlite`: a run that is loaded, and texts of its own."""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, run_script
from jaxtyping import TypeCheckError

import gptlite as gl

TRAIN = [
    *("--data.corpus", "text.txt", "--model.n-layers", "1", "--model.d-model", "16"),
    *("--model.context-length", "16", "--training.batch-size", "4", "--training.steps", "2"),
    *("--training.sample-tokens", "0", "--model.embed-previous", "0", "--model.mlp", "swiglu"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with two runs, and the second of them in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "text.txt").write_text(TEXT)
    for name, seed in (("old", "1"), ("new", "2")):
        words = ("--run", name, "--training.seed", seed)
        done = run_script("train.py", *TRAIN, *words, folder=folder)
        assert done.code == 0, done.err
    gl.export_run(gl.load(folder / "runs" / "new"), folder / "exported")
    return folder


def logits(run: gl.Run) -> np.ndarray:
    return np.asarray(eqx.filter_jit(run.model)(jnp.asarray(run.tokenizer.encode("the mill"))))


def test_a_model_is_loaded_by_any_of_its_names(place, monkeypatch):
    monkeypatch.chdir(place)
    wanted = logits(gl.load("new"))
    for name in (None, "runs/new", Path("runs/new"), place / "runs" / "new"):
        np.testing.assert_array_equal(logits(gl.load(name)), wanted)
    for name in ("hf:exported", "exported", Path("exported")):
        np.testing.assert_allclose(logits(gl.load(name)), wanted, rtol=1e-5, atol=1e-6)
    assert not np.allclose(logits(gl.load("old")), wanted, atol=1e-3)
    for name, words in (("absent", "There is no run absent"), ("hf:absent", "absent")):
        with pytest.raises(gl.UserError, match=words):
            gl.load(name)
    with pytest.raises(gl.UserError, match="leave --weights last out"):
        gl.load("exported", "last")


def test_a_run_generates_the_text_of_sample(place, monkeypatch):
    monkeypatch.chdir(place)
    run = gl.load("new")
    options = ["--max-new-tokens", "40", "--temperature", "0.7", "--top-k", "5", "--seed", "3"]
    done = run_script("sample.py", "--run", "new", "--prompt", "the", *options, folder=place)
    text = run.generate("the", max_new_tokens=40, temperature=0.7, top_k=5, seed=3)
    assert f"{text}\n" == done.out
    pieces = list(run.stream("the", max_new_tokens=40, temperature=0.7, top_k=5, seed=3))
    assert "".join(pieces) == text
    assert len(pieces) > 1
    assert run.generate("the", max_new_tokens=40, temperature=0.7, top_k=5, seed=4) != text
    stop = text[5:8]
    short = run.generate("the", max_new_tokens=40, temperature=0.7, top_k=5, seed=3, stop=[stop])
    assert short == text[: text.index(stop)]
    greedy = run.generate("the", max_new_tokens=9, greedy=True)
    assert greedy == run.generate("the", max_new_tokens=9, greedy=True, seed=7)
    assert greedy == run.generate("the", max_new_tokens=9, temperature=0.0, top_k=0)
    with pytest.raises(gl.UserError, match="weights must be best or last, got 'lats'"):
        gl.load("new", "lats")  # pyright: ignore[reportArgumentType]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 1.5}, "seed must be int"),
        ({"stop": "the"}, "stop must be a list of strings, got 'the'"),
        ({"top_p": 2.0}, "top_p must be"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(gl.UserError, match=words):
            run.stream("the", **wrong)
    with pytest.raises(gl.UserError, match="is not in the vocabulary"):
        run.stream("🙂")
    with pytest.raises(gl.UserError, match="The prompt is empty"):
        run.generate("")


def test_one_key_serves_all_rows(place):
    model = gl.load(place / "runs" / "new").model
    prompts, key = np.ones((3, 4), np.int32), jax.random.key(5)
    ids = gl.generate(model, prompts, 8, key=key)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(3))
    np.testing.assert_array_equal(ids, gl.generate(model, prompts, 8, keys=keys))
    np.testing.assert_array_equal(ids[:1], gl.generate(model, prompts[:1], 8, key=key))
    assert gl.generate(model, prompts, 0, key=key).shape == (3, 0)
    alone = {"key": key, "lengths": np.array([2])}
    single = gl.generate(model, np.array([1, 2, 3]), 8, **alone)
    np.testing.assert_array_equal(single, gl.generate(model, np.array([1, 2]), 8, key=key))
    wrongs: list[dict[str, Any]] = [{}, {"key": key, "keys": keys}]
    for given in wrongs:
        with pytest.raises(gl.UserError, match="Give either key, one for all rows, or keys"):
            gl.generate(model, prompts, 8, **given)


def test_a_list_of_documents_is_a_corpus(tmp_path):
    texts = [f"Document {number}, {'of a few words. ' * (number % 3)}" for number in range(30)]
    corpus = gl.documents(texts)
    tokenizer = gl.make_tokenizer("bpe:300", corpus)
    split = gl.split_corpus(corpus, tokenizer, folder=tmp_path)
    (end,) = tokenizer.end_ids
    held_out, training = texts[9::10], [text for i, text in enumerate(texts) if i % 10 != 9]
    for ids, wanted in ((split.validation, held_out), (split.train, training)):
        ends = np.flatnonzero(np.asarray(ids) == end)
        documents = np.split(np.asarray(ids), ends + 1)[:-1]
        assert [tokenizer.decode(part[:-1]) for part in documents] == wanted
    again = gl.split_corpus(gl.documents(texts), tokenizer, folder=tmp_path)
    np.testing.assert_array_equal(again.train, split.train)
    other = gl.split_corpus(gl.documents(texts[1:]), tokenizer, folder=tmp_path)
    assert other.sha256 != split.sha256
    corpus = gl.documents(kept := list(texts))
    kept.reverse()
    assert list(corpus.read(None)) == texts
    wrongs: list[Any] = [[], [1], ["a", None], "abc", iter(["a"])]
    for wrong in wrongs:
        with pytest.raises(gl.UserError, match="documents takes a list of strings"):
            gl.documents(wrong)


def test_a_model_of_one_device_is_evaluated_on_all(place, monkeypatch):
    monkeypatch.chdir(place)
    run = gl.load("new")
    split = gl.split_corpus(gl.load_corpus("text.txt"), run.tokenizer)
    losses = [
        float(gl.Evaluation(split.validation, 16, gl.make_mesh(devices=devices))(run.model))
        for devices in (None, jax.devices()[:1])
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_run_that_is_resumed_keeps_its_settings_in_python_too(place, monkeypatch):
    monkeypatch.chdir(place)
    config = gl.load("old").config
    changed = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-5)
    )
    arguments = gl.TrainArguments(resume="old", config=changed)
    wrong = r"may not change on --resume: optimizer\.learning_rate"
    with pytest.raises(gl.UserError, match=wrong), gl.start_run(arguments):
        pass
    assert gl.load("old").config == config


KEY = jax.random.key(0)


def made(**knobs: Any) -> list[list[str]]:
    run = gl.load("new")
    return list(gl.stream_texts(run.model, run.tokenizer, "the", **knobs))


def split(tokens: int = 100, most: int | None = None) -> object:
    return gl.split_corpus(gl.text_corpus(TEXT), gl.make_tokenizer("byte"), tokens, most)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gl.load(""), "no run named ''"),
        (lambda: gl.load("a\0b"), "no run named 'a.x00b'"),
        (lambda: gl.load("new", custom="absent.py"), r"--custom absent\.py cannot be read"),
        (lambda: gl.load("exported", custom="absent.py"), r"--custom absent\.py cannot be read"),
        (lambda: gl.load("new", custom="text.txt"), r"ends in \.py, got 'text\.txt'"),
        (lambda: gl.load("new", custom=[3]), r"custom must be a file .* got \[3\]"),  # pyright: ignore
        (lambda: gl.load("new").generate("the", stop=[3]), r"stop must be a list of strings"),  # pyright: ignore
        (lambda: gl.load("new").generate("the", stop="the"), r"stop must be a list of strings"),
        (lambda: gl.load("new").generate("the", stop=[""]), r"at least one character, got \[''\]"),
        (lambda: made(stop="the"), r"stop must be a list of strings, got 'the'"),
        (lambda: made(texts=-1), "texts must be at least 1 .*, got -1"),
        (lambda: made(seed=10**30), "seed must be at least 0 and at most 2147483647"),
        (lambda: gl.Encoder(gl.ModelConfig(), -1, key=KEY), "vocab_size must be at least 1"),
        (lambda: gl.summary(gl.load("new").model, batch_size=-1), "batch_size must be at least 1"),
        (lambda: gl.Config(model={}), "model must be ModelConfig, got {}"),  # pyright: ignore
        (lambda: split(1), "validation_tokens must be at least 2 .*, got 1"),
        (lambda: split(most=-1), "max_tokens must be at least 2 .*, got -1"),
        (lambda: gl.check_block(gl.GPT, d_model=-1), "d_model must be at least 1"),
        (lambda: gl.check_block(gl.GPT, seq=0), "seq must be at least 1"),
        (lambda: gl.check_block(gl.GPT, seed=-1), "seed must be at least 0"),
    ],
)
def test_a_wrong_argument_is_named(call, words, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(gl.UserError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gl.export_run("new", "folder"), "'run'"),  # pyright: ignore
        (lambda: gl.make_tokenizer("char", 4), "'corpus'"),  # pyright: ignore
        (lambda: gl.trainable("quick", gl.load("new").model), "'config'"),  # pyright: ignore
        (lambda: gl.split_corpus("text", "char"), "'corpus'"),  # pyright: ignore
        (lambda: gl.make_model("quick", "char", key=KEY), "'config'"),  # pyright: ignore
    ],
)
def test_an_argument_of_another_type_is_named(call, words, place, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(TypeCheckError, match=f"parameter {words}"):
        call()
