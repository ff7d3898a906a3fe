"""A layer from the step of one token: it is right in all ways in which a layer is called."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TEXT, run_script, tiny_run

from gptlite.errors import UserError
from gptlite.nn import Context, Linear, Recurrence
from gptlite.research.check_block import SMALL, check_block

D = SMALL.d_model


class Mean(Recurrence):
    """A moving average with a decay for each channel, from a value that is learned."""

    first: jax.Array
    decay: jax.Array
    value: Linear

    def __init__(self, config=SMALL, *, key):
        self.first = jnp.ones(config.d_model)
        self.decay = jnp.full(config.d_model, 2.0)
        self.value = Linear(config.d_model, config.d_model, std=0.3, key=key)

    def init_state(self):
        return self.first

    def mix(self, state, v):
        share = jax.nn.sigmoid(self.decay)
        state = share * state + (1 - share) * v
        return state, state

    def step(self, state, x):
        return self.mix(state, self.value(x))


class MeanFromValues(Mean):
    """The same, with all values at once."""

    def before(self, x):
        return {"value": self.value(x)}

    def step(self, state, x):
        return self.mix(state, x["value"])


@pytest.mark.parametrize("block", [Mean, MeanFromValues])
def test_it_passes_all_laws(block):
    config = dataclasses.replace(SMALL, separate_documents=True)
    report = check_block(block, config=config, reference=Mean, sees="all earlier")
    assert {"cached", "padding", "documents", "sees", "reference"} <= set(report.checks)


def test_it_is_its_formula():
    with jax.enable_x64(True):
        block = Mean(key=jax.random.key(0))
        block = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), block)
        x = np.random.default_rng(0).normal(size=(2, 3, 7, D))
        starts = np.array([0, 0, 0, 3, 3, 5, 5])
        context = Context(document_starts=jnp.broadcast_to(starts, (2, 3, 7)))
        out, _ = block(jnp.asarray(x), context=context)
        share = 1 / (1 + np.exp(-2.0))
        wanted, values = np.empty_like(x), x @ np.asarray(block.value.weight).T
        for t in range(7):
            before = wanted[..., t - 1, :] if starts[t] < t else np.ones(D)
            wanted[..., t, :] = share * before + (1 - share) * values[..., t, :]
        np.testing.assert_allclose(out, wanted, rtol=1e-12)


class Counts(Recurrence):
    """A state of several arrays, one of whole numbers, and no parameter."""

    def init_state(self):
        return {"sum": jnp.zeros(()), "tokens": jnp.zeros((), int)}

    def step(self, state, x):
        state = {"sum": state["sum"] + x.mean(), "tokens": state["tokens"] + 1}
        return state, x * state["tokens"].astype(x.dtype)


def test_the_state_is_kept_in_float32():
    block = jax.tree.map(lambda a: a.astype(jnp.bfloat16), Mean(key=jax.random.key(0)))
    cache = block.init_cache((2,), 9, jnp.bfloat16)
    assert (cache.dtype, cache.shape) == (jnp.float32, (2, D))
    y, cache = block(jnp.ones((2, 1, D), jnp.bfloat16), cache, Context(start=0))
    assert (y.dtype, cache.dtype) == (jnp.bfloat16, jnp.float32)
    counts = Counts()
    cache = counts.init_cache((), 9, jnp.bfloat16)
    context = Context(start=0, lengths=jnp.asarray(2))
    _, cache = counts(jnp.ones((5, D), jnp.bfloat16), cache, context)
    assert (cache["sum"].dtype, int(cache["tokens"])) == (jnp.float32, 2)


class NoState(Counts):
    def step(self, state, x):
        return x


class AnotherState(Counts):
    def step(self, state, x):
        return {**state, "sum": x}, x


class WholeNumber(Counts):
    def step(self, state, x):
        return {**state, "tokens": state["tokens"] + 0.5}, x


class Narrow(Counts):
    def step(self, state, x):
        return {**state, "sum": state["sum"].astype(jnp.bfloat16)}, x


class Short(Counts):
    def step(self, state, x):
        return state, x[1:]


class NoTokens(Counts):
    def before(self, x):
        return x, 3.0


class Nothing(Counts):
    def before(self, x):
        return None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (WholeNumber, "must return a state in int32, as init_state does, got float32"),
        (Narrow, "Narrow.step must return a state in float32, as init_state does, got bfloat16"),
        (Short, rf"Short.step must return an output \[d_model\], \[{D}\], got \[{D - 1}\]"),
        (NoTokens, r"NoTokens.before must return arrays .* got one of \[\]"),
        (Nothing, r"Nothing.before must return arrays .* got none"),
        (NoState, r"NoState.step must return \(state, y\)"),
        (
            AnotherState,
            "AnotherState.step must return a state like that of init_state: it returned",
        ),
    ],
)
def test_a_wrong_step_is_refused(block, words):
    with pytest.raises(UserError, match=words):
        block()(jnp.ones((1, 4, D)))


def test_a_subclass_without_a_step_cannot_be_made():
    class Half(Recurrence):
        def init_state(self):
            return jnp.zeros(())

    half: Any = Half
    with pytest.raises(TypeError, match="step"):
        half()


def test_it_is_trained_resumed_and_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("blocks_of_a_recurrence.py").write_text(Path(__file__).read_text("utf-8"))
    words = [*tiny_run(), "--model.attention", "blocks_of_a_recurrence.py:Mean", "--run", "mean"]
    first = run_script("train.py", *words, folder=Path())
    assert (first.code, first.err) == (0, "")
    more = ["--resume", "mean", "--custom", "blocks_of_a_recurrence.py"]
    more += ["--data.corpus", "text.txt", "--training.steps", "12"]
    assert run_script("train.py", *more, folder=Path()).code == 0
    words = ["--run", "mean", "--custom", "blocks_of_a_recurrence.py", "--prompt", "t"]
    words += ["--max-new-tokens", "40", "--num-samples", "2"]
    assert len(run_script("sample.py", *words, folder=Path()).out) > 80
