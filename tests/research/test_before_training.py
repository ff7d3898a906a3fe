"""The cheap laws are run on custom blocks before they are trained."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from conftest import TEXT, TINY, run_script, tiny_run
from support.blocks import Layer, OneHead

from gptlite.errors import UserError
from gptlite.machine.names import CustomBlock, custom_name
from gptlite.research import before_training
from gptlite.research.before_training import check_custom


class Peeks(Layer):
    def __call__(self, x):
        return super().__call__(x) + jnp.mean(x, axis=-2, keepdims=True)


class LooksOneAhead(OneHead):
    def mask(self, queries, keys, start):
        return super().mask(queries, keys, start + 1)


class Options(Layer):
    """Fails if it is made otherwise than in the run."""

    def __init__(self, config, *, rank: int = 4, layer, key):
        assert (config.d_ff, rank) == (48, 2)
        super().__init__(config, key=key)


class NeedsABatch(eqx.Module):
    weight: jax.Array

    def __init__(self, config, *, key):
        self.weight = jax.random.normal(key, (config.d_model, config.d_model))

    def __call__(self, x):
        return jnp.einsum("bsd,ed->bse", x, self.weight)


def test_right_blocks_are_told(capsys):
    check_custom(dataclasses.replace(TINY, mlp=Layer, attention=OneHead))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        f"parameters, shapes, causal hold; gptlite check-block {custom_name(block)} runs the other "
        "laws."
        for block in (OneHead, Layer)
    ]
    check_custom(TINY)
    assert capsys.readouterr().out == ""


def test_a_block_is_checked_as_it_is_in_the_run():
    config = dataclasses.replace(TINY, mlp=Options, d_ff=48)
    with pytest.raises(UserError, match="cannot be built: AssertionError"):
        check_custom(config)
    name = f"{config.mlp}:rank=2"
    check_custom(dataclasses.replace(config, mlp=CustomBlock(name, Options)))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"mlp": Peeks}, r"causal: the output at position 0 depends on inputs from position 1 on"),
        ({"attention": LooksOneAhead}, "causal: the output at position 0 depends on inputs from"),
        ({"norm": NeedsABatch}, "shapes: it raised"),
    ],
)
def test_a_block_that_breaks_a_law_is_refused(block, words):
    with pytest.raises(UserError, match=rf"is not trained\. {words}.*--no-check-blocks\.$"):
        check_custom(dataclasses.replace(TINY, **block))


def test_what_is_not_checked_is_told(monkeypatch, capsys):
    check_custom(dataclasses.replace(TINY, mlp=Peeks, context_length=3))
    assert "Peeks is not checked: the context is shorter than 4 tokens" in capsys.readouterr().out
    monkeypatch.setattr(before_training, "MOST", 100)
    check_custom(dataclasses.replace(TINY, mlp=Peeks))
    assert "Peeks is not checked: it has 768 parameters" in capsys.readouterr().out


def test_a_run_of_a_wrong_block_needs_an_option(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    source = "from test_before_training import Peeks as _Peeks\nclass Mine(_Peeks): pass\n"
    (tmp_path / "peeking_block.py").write_text(source)
    words = [*tiny_run(), "--model.mlp", "peeking_block.py:Mine", "--run", "mine"]
    done = run_script("train.py", *words, folder=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "error: model.mlp peeking_block.py:Mine is not trained. causal: " in done.err
    assert not (tmp_path / "runs").exists()
    done = run_script("train.py", *words, "--no-check-blocks", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
    more = ["--resume", "mine", "--custom", "peeking_block.py", "--data.corpus", "text.txt"]
    done = run_script("train.py", *more, "--training.steps", "9", folder=tmp_path)
    assert (done.code, done.err) == (0, "")
