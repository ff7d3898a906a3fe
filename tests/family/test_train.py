"""Training of any model: an encoder that learns what its tokens' neighbours are."""

import concurrent.futures
import dataclasses
import os
import signal
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptlite.config import ModelConfig, OptimizerConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.family.encoder import Encoder
from gptlite.family.train import train
from gptlite.machine.pytrees import is_parameter
from gptlite.models.gpt import GPT
from gptlite.training.fit import DivergenceError
from gptlite.training.loss import cross_entropy, window_losses

VOCAB = 16
CONFIG = ModelConfig(
    n_layers=1, n_heads=2, d_model=16, context_length=6, dropout=0.01, embed_previous=0
)
TRAINING = TrainingConfig(
    steps=245, batch_size=8, eval_every=120, log_every=50, compute_dtype="float32"
)


def losses(model, batch, *, label_smoothing, key):
    """What stands two places further on is to be told."""
    hidden = model(batch["ids"], key=key)
    return cross_entropy(hidden, batch["targets"], label_smoothing) * batch["scale"][:, None]


def batch(step):
    ids = np.random.default_rng(step).integers(VOCAB, size=(8, 6)).astype(np.int32)
    return {"ids": ids, "targets": np.roll(ids, -2, axis=1), "scale": np.ones(8, np.float32)}


@pytest.fixture(scope="module")
def model():
    return eqx.filter_jit(Encoder)(CONFIG, VOCAB, key=jax.random.key(0))


@pytest.fixture(scope="module")
def trained(model):
    looks = []

    @eqx.filter_jit
    def losses_of(model, batch):
        return losses(model, batch, label_smoothing=0, key=None)

    def look(model):
        found = losses_of(model, jax.tree.map(jnp.asarray, batch(99)))
        looks.append(float(found.mean()))
        return "looked"

    return train(model, losses, batch, OptimizerConfig(), TRAINING, evaluate=look), looks


def test_an_encoder_learns_what_depends_on_later_tokens(trained, model, capsys):
    _, looks = trained
    assert len(looks) == 3  # after 120, 240 and 245 steps
    assert looks[-1] < 0.5 * np.log(VOCAB)
    assert jax.tree.leaves(eqx.filter(model, eqx.is_array))[0].is_deleted() is False


def test_training_is_deterministic_to_the_bit(trained, model, capsys):
    again = train(model, losses, batch, OptimizerConfig(), TRAINING)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(eqx.filter(m, eqx.is_array) for m in (again, trained[0])),
    )
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines()] == ["120/245", "240/245", "245/245"]


def test_a_loss_that_is_not_finite_is_said(model):
    def bad(step):
        return batch(step) | {"scale": np.full(8, np.inf if step == 17 else 1, np.float32)}

    with pytest.raises(DivergenceError, match="diverged at step 18"):
        train(model, losses, bad, OptimizerConfig(), TRAINING)


@pytest.mark.parametrize(
    "bad",
    [
        lambda step: jax.tree.map(lambda x: x[:5], batch(step)),
        lambda step: batch(step) | {"ids": batch(step)["ids"][:, : 6 - step // 30]},
        lambda step: {"ids": [1, 2]},
        lambda step: {},
        lambda step: batch(step) | ({"scale": np.ones(8, np.int32)} if step > 30 else {}),
    ],
)
def test_batches_of_another_shape_are_said(model, bad):
    words = r"an axis of training.batch_size, 8; at step|must have the same shapes"
    with pytest.raises(UserError, match=words):
        train(model, losses, bad, OptimizerConfig(), TRAINING)


def test_what_is_frozen_is_told_by_a_filter(model):
    training = dataclasses.replace(TRAINING, freeze="embedding.*")
    with pytest.raises(UserError, match=r"training\.freeze needs trainable"):
        train(model, losses, batch, OptimizerConfig(), training)


def test_adapters_alone_are_told_by_a_filter():
    model = GPT(dataclasses.replace(CONFIG, lora="4"), VOCAB, key=jax.random.key(0))
    with pytest.raises(UserError, match="adapters alone are trained: give trainable"):
        train(model, window_losses, batch, OptimizerConfig(), TRAINING)


@pytest.mark.parametrize(("name", "tied"), [("muon", True), ("adamw", False)])
def test_a_frozen_table_stays_what_it_is(name, tied):
    key = jax.random.key(0)
    vectors = jax.random.normal(key, (VOCAB, 16))
    config = dataclasses.replace(CONFIG, tied_head=tied)
    model = eqx.filter_jit(GPT)(config, VOCAB, key=key)
    model = eqx.tree_at(lambda model: model.embedding.weight, model, vectors)
    all_but_the_table = eqx.tree_at(
        lambda model: model.embedding.weight, jax.tree.map(is_parameter, model), False
    )
    optimizer = OptimizerConfig(name=name, weight_decay=0.1)
    training = dataclasses.replace(TRAINING, steps=3)

    def windows(step):
        return np.random.default_rng(step).integers(VOCAB, size=(8, 7)).astype(np.int32)

    given = (model, window_losses, windows, optimizer, training)
    after = train(*given, trainable=all_but_the_table)
    np.testing.assert_array_equal(after.embedding.weight, vectors)
    assert np.abs(after.norm.weight - model.norm.weight).max() > 0
    if name == "muon":
        moved = train(*given)
        assert np.abs(moved.embedding.weight - vectors).max() > 1e-3


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end(model, number, capsys):
    """Also one that comes while JAX runs, which may swallow a KeyboardInterrupt."""

    def evaluate(model):
        os.kill(os.getpid(), number)
        return "evaluated"

    training = dataclasses.replace(TRAINING, eval_every=2, log_every=1)
    raised, said = {signal.SIGINT: (KeyboardInterrupt, "^$"), signal.SIGTERM: (SystemExit, "143")}[
        number
    ]
    with pytest.raises(raised, match=said):
        train(model, losses, batch, OptimizerConfig(name="adamw"), training, evaluate=evaluate)
    assert "step 2/245" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_on_another_thread_leaves_signals_alone(model):
    training = dataclasses.replace(TRAINING, steps=2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(train, model, losses, batch, OptimizerConfig(name="adamw"), training).result()
