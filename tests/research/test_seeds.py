"""Several seeds in one program: each gets what it would get alone."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import TEXT, TINY

from gptlite.config import Config, OptimizerConfig, TrainingConfig
from gptlite.machine.mesh import make_mesh
from gptlite.research.seeds import fit_seeds
from gptlite.runs.model import make_model
from gptlite.runs.tokenizers import make_tokenizer
from gptlite.text.batches import Batches
from gptlite.text.corpus import text_corpus
from gptlite.text.tokens import split_corpus
from gptlite.training.evaluate import Evaluation
from gptlite.training.fit import fit
from gptlite.training.step import TrainSteps

TOKENIZER = make_tokenizer("char", text_corpus(TEXT))
SPLIT = split_corpus(text_corpus(TEXT), TOKENIZER)
CONFIG = Config(
    model=TINY,
    optimizer=OptimizerConfig(name="adamw", learning_rate=0.01),
    training=TrainingConfig(
        steps=16, batch_size=4, log_every=6, eval_every=8, compute_dtype="float32"
    ),
)


@pytest.fixture(scope="module")
def three():
    # Three on two devices: one of them has a gap to fill.
    return list(fit_seeds(CONFIG, TOKENIZER, [3, 0, 7], SPLIT))


def test_fit_seeds_reports_every_dispatch_and_evaluation(three):
    assert {6, 8, 14, 16} <= {progress.step for progress in three}
    evaluated = [progress.step for progress in three if progress.val_losses is not None]
    assert evaluated == [8, 16]
    assert {progress.steps for progress in three} == {16}
    assert len(set(three[-1].val_losses)) == 3


def test_a_seed_gets_what_it_would_get_alone(three):
    place, seed = 2, 7
    training = dataclasses.replace(CONFIG.training, seed=seed)
    config = dataclasses.replace(CONFIG, training=training)
    model_key, _ = jax.random.split(jax.random.key(seed))
    model = eqx.filter_jit(make_model)(CONFIG.model, TOKENIZER, key=model_key)
    train_steps = TrainSteps(model, config.optimizer, training, make_mesh())
    evaluate = Evaluation(SPLIT.validation, TINY.context_length, train_steps.mesh)
    batches = Batches(SPLIT.train, 4, TINY.context_length, seed)
    losses = [
        float(evaluate(progress.state.model))
        for progress in fit(train_steps.init(model), train_steps, batches)
        if progress.evaluation_due
    ]
    together = [p.val_losses[place] for p in three if p.val_losses is not None]
    # float32 sums in another order.
    np.testing.assert_allclose(together, losses, rtol=1e-4)
    others = [p.val_losses[1] for p in three if p.val_losses is not None]
    assert not np.allclose(others, losses, rtol=2e-3)


def test_the_first_parameters_may_be_those_of_another_seed(three):
    """The batches stay those of the seed."""
    again = list(fit_seeds(CONFIG, TOKENIZER, [3, 0, 7], SPLIT, drawn_from=[3, 7, 7]))
    same, other, third = np.transpose([p.val_losses for p in again if p.val_losses is not None])
    before = np.transpose([p.val_losses for p in three if p.val_losses is not None])
    np.testing.assert_allclose(same, before[0], rtol=1e-4)
    np.testing.assert_allclose(third, before[2], rtol=1e-4)
    for seed in (1, 2):
        assert not np.allclose(other, before[seed], rtol=5e-4)
