"""Parameters that stay as they are."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import TINY, VOCAB, drawn

from gptlite.adapters import with_adapters
from gptlite.config import Config, OptimizerConfig, TrainingConfig
from gptlite.errors import UserError
from gptlite.machine.mesh import make_mesh
from gptlite.machine.names import parse_lora
from gptlite.machine.pytrees import size_of
from gptlite.models.gpt import GPT
from gptlite.runs.frozen import frozen_in, trainable
from gptlite.runs.weights import named_arrays
from gptlite.training.step import TrainSteps

LORA = "2:matrices=query+down"
BATCH = np.random.default_rng(0).integers(VOCAB, size=(2, 4, TINY.context_length + 1))


def make_config(freeze: str = "", lora: str | None = None, **changes) -> Config:
    training = TrainingConfig(
        steps=2, batch_size=4, freeze=freeze, init_from="somewhere", compute_dtype="float32"
    )
    return Config(
        model=dataclasses.replace(TINY, lora=lora, **changes),
        training=training,
        optimizer=OptimizerConfig(name="adamw", learning_rate=0.1),
    )


def model_of(config: Config) -> GPT:
    model = drawn(lambda key: GPT(config.model, VOCAB, key=key))
    if config.model.lora is None:
        return model
    return with_adapters(model, parse_lora(config.model.lora), key=jax.random.key(1))


@pytest.mark.parametrize(
    ("config", "is_trained"),
    [
        (make_config(), lambda name: True),
        (make_config("embedding.*"), lambda name: not name.startswith("embedding")),
        (make_config("embedding.*, *.mlp.*"), lambda n: ".mlp." not in n and n[:9] != "embedding"),
        (make_config("stack.*"), lambda name: not name.startswith("stack")),
        (make_config(lora=LORA), lambda name: "lora" in name),
        (make_config(lora=LORA, stack="scan"), lambda name: "lora" in name),
    ],
    ids=["all", "embedding", "mlp", "stack", "lora", "scanned lora"],
)
def test_what_is_frozen_keeps_its_bits_and_the_rest_changes(config, is_trained):
    model = model_of(config)
    trained = trainable(config, model)
    steps = TrainSteps(model, config.optimizer, config.training, make_mesh(), trainable=trained)
    state = steps.init(model)
    before = named_arrays(state.model)
    # Adam's two means of each number that is trained, and its count.
    numbers = sum(x.size for name, x in before.items() if is_trained(name))
    assert size_of(state.optimizer_state) == pytest.approx(8 * numbers, abs=64)
    state, metrics = steps(state, BATCH.astype(np.int32), 2)
    assert np.all(np.isfinite(metrics.loss))
    is_frozen = frozen_in(config)
    for name, array in named_arrays(state.model).items():
        assert is_frozen(name) == (not is_trained(name))
        assert np.array_equal(array, before[name]) == is_frozen(name), name


def test_gradients_of_what_is_trained_are_those_of_the_whole_model():
    whole, part = make_config(), make_config("embedding.*,*.mlp.*")
    model, grads = model_of(whole), {}
    for config in (whole, part):
        trained = trainable(config, model)
        steps = TrainSteps(model, config.optimizer, config.training, make_mesh(), trainable=trained)
        batch = BATCH[0].astype(np.int32)
        with jax.set_mesh(steps.mesh):
            _, found = eqx.filter_jit(steps.loss_and_grads)(model, batch, jax.random.key(0))
        grads[config.training.freeze] = named_arrays(found)
    everything, some = grads.values()
    assert some.keys() < everything.keys()
    for name, grad in some.items():
        np.testing.assert_allclose(grad, everything[name], rtol=1e-4, atol=1e-6)


def test_patterns_that_mean_nothing_are_refused():
    model = model_of(make_config())
    with pytest.raises(UserError, match=r"names no parameter of this model: 'embeding\.\*'"):
        trainable(make_config("norm.*,embeding.*"), model)
    with pytest.raises(UserError, match="leaves nothing to train"):
        trainable(make_config("*"), model)
    for pattern in (",", " ", "norm.*,", "*" * 1001):
        with pytest.raises(UserError, match="must be patterns of names"):
            make_config(pattern)


def test_adapters_are_of_a_model_that_has_been_trained():
    with pytest.raises(UserError, match="name it with --init-from"):
        Config(model=dataclasses.replace(TINY, lora="2"))
    with pytest.raises(UserError, match=r"leave training\.freeze out"):
        make_config("embedding.*", LORA)
