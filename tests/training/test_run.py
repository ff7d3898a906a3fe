import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import TEXT, TINY

from gptlite.config import Config, UserError, load_config
from gptlite.models.gpt import GPT
from gptlite.text.tokenizer import make_tokenizer
from gptlite.training.run import RunFolder, load_run, newest_run, weights_to_bytes

TOKENIZER = make_tokenizer("char", TEXT)
CONFIG = Config(model=TINY)
MODEL = eqx.filter_jit(GPT)(TINY, TOKENIZER.vocab_size, key=jax.random.key(0))


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs" / "one", CONFIG, TOKENIZER)
    folder.save_weights(MODEL, best=True)
    return folder


def test_what_was_saved_is_loaded(run):
    loaded = load_run(run.path)
    assert loaded.config == CONFIG
    assert loaded.tokenizer.encode(TEXT).tolist() == TOKENIZER.encode(TEXT).tolist()
    saved, again = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (MODEL, loaded.model))
    for a, b in zip(saved, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(loaded.model) == jax.tree.structure(MODEL)


def test_a_config_from_before_earlier_tokens_were_embedded_has_none(run):
    path = run.path / "config.json"
    sections = json.loads(path.read_text())
    del sections["model"]["embed_previous"]
    path.write_text(json.dumps(sections))
    assert load_config(path).model.embed_previous == 0
    path.write_text(json.dumps(sections | {"model": []}))
    with pytest.raises(UserError, match="not a readable gptlite config"):
        load_config(path)


def test_names_and_layouts_are_those_of_the_readme():
    arrays = safetensors.numpy.load(weights_to_bytes(MODEL))
    assert {name: array.shape for name, array in arrays.items()} == {
        "embedding.weight": (TOKENIZER.vocab_size, 16),
        "previous.0.weight": (TOKENIZER.vocab_size, 16),
        "previous.1.weight": (TOKENIZER.vocab_size, 16),
        "stack.blocks.attention_norm.weight": (2, 16),
        "stack.blocks.attention.query.weight": (2, 16, 16),
        "stack.blocks.attention.key.weight": (2, 16, 16),
        "stack.blocks.attention.value.weight": (2, 16, 16),
        "stack.blocks.attention.output.weight": (2, 16, 16),
        "stack.blocks.mlp_norm.weight": (2, 16),
        "stack.blocks.mlp.up.weight": (2, 64, 16),
        "stack.blocks.mlp.down.weight": (2, 16, 64),
        "norm.weight": (16,),
        "head.weight": (TOKENIZER.vocab_size, 16),
    }


def test_best_stays_when_last_moves_on(run):
    later = eqx.tree_at(lambda model: model.norm.weight, MODEL, jnp.full(16, 2.0))
    run.save_weights(later, best=False)

    def gain(which):
        model: Any = load_run(run.path, which).model
        return float(model.norm.weight[0])

    assert gain("best") == 1.0
    assert gain("last") == 2.0


def test_a_run_is_not_overwritten_unasked(run):
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(UserError, match="--overwrite"):
        RunFolder.create(run.path, CONFIG, TOKENIZER)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    RunFolder.create(run.path, CONFIG, TOKENIZER, overwrite=True)
    assert not (run.path / "best.safetensors").exists()


def test_what_is_no_run_is_not_overwritten_even_when_asked(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(UserError, match="not a run"):
        RunFolder.create(tmp_path / "thesis", CONFIG, TOKENIZER, overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"


def rewrite(path, change):
    arrays = safetensors.numpy.load(path.read_bytes())
    change(arrays)
    path.write_bytes(safetensors.numpy.save(arrays))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "best.safetensors").unlink(), "cannot be read"),
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
            "multiple of model.n_heads",
        ),
        (lambda p: (p / "tokenizer.json").write_text("{"), "cannot be read"),
        (lambda p: (p / "tokenizer.json").write_text("[]"), "not a tokenizer"),
    ],
)
def test_a_damaged_run_is_refused_by_name(run, damage, words):
    damage(run.path)
    with pytest.raises(UserError, match=words):
        load_run(run.path)


def test_metrics_are_one_object_a_line(run):
    run.log({"step": 1})
    run.log({"step": 2, "val_loss": 1.5})
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1}, {"step": 2, "val_loss": 1.5}]


def test_the_newest_run_is_the_one_saved_last(run, tmp_path):
    import os

    other = RunFolder.create(tmp_path / "runs" / "two", CONFIG, TOKENIZER)
    assert newest_run(tmp_path / "runs") == run.path  # the other has no weights yet
    other.save_weights(MODEL, best=True)
    os.utime(other.path / "best.safetensors", (1, 1))
    assert newest_run(tmp_path / "runs") == run.path
    os.utime(run.path / "best.safetensors", (0, 0))
    assert newest_run(tmp_path / "runs") == other.path


def test_no_run_yet_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"run `python train\.py` first"):
        newest_run(tmp_path)
