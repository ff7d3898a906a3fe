"""Models are values: they can be copied, pickled, differentiated twice, and made of any class."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VARIANTS, VOCAB, tiny_model

from gptlite import GPT, ModelConfig
from gptlite.config import MLPS
from gptlite.nn.linear import Linear
from gptlite.training.loss import window_losses

IDS = jnp.arange(TINY.context_length) % VOCAB
WINDOWS = jnp.arange(2 * (TINY.context_length + 1)).reshape(2, -1) % VOCAB
MODELS = VARIANTS | {mlp: {"mlp": mlp} for mlp in MLPS}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_model_is_that_model(name, copied):
    """As one keeps a target network, or an average."""
    model = tiny_model(**MODELS[name])
    again = copied(model)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert eqx.tree_equal(again, model)
    assert again.config == model.config


def summed(parameters: Any, rest: Any) -> Any:
    losses = window_losses(eqx.combine(parameters, rest), WINDOWS)
    return (losses[0] if isinstance(losses, tuple) else losses).sum()


@pytest.mark.parametrize("name", VARIANTS)
def test_second_derivatives_are_those_of_the_first(name):
    """Backward over backward: against finite differences of the gradient, in float64."""
    with jax.enable_x64(True):
        model = jax.tree.map(
            lambda x: x.astype(float) if eqx.is_inexact_array(x) else x,
            tiny_model(**VARIANTS[name] | {"n_layers": 2, "stack": "unrolled"}),
        )
        parameters, rest = eqx.partition(model, eqx.is_inexact_array)
        gradient = jax.jit(jax.grad(lambda p: summed(p, rest)))
        random = np.random.default_rng(0)
        along = jax.tree.map(lambda x: random.normal(size=x.shape), parameters)

        def slope(p: Any) -> Any:
            products = jax.tree.map(jnp.vdot, gradient(p), along)
            return sum(jax.tree.leaves(products))

        found = jax.jit(jax.grad(slope))(parameters)
        step = 1e-6
        above, below = (
            gradient(
                jax.tree.map(lambda x, d, s=sign: np.asarray(x) + s * step * d, parameters, along)
            )
            for sign in (1, -1)
        )
        pairs = zip(jax.tree.leaves(above), jax.tree.leaves(below), strict=True)
        wanted = [(np.asarray(a) - np.asarray(b)) / (2 * step) for a, b in pairs]
        # The error of the differences: rounding / step, and the third derivative times step².
        for a, b in zip(jax.tree.leaves(found), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * (np.abs(b).max() + 1e-3))


def make(width: int) -> type:
    """A class of the same name each time, as one that is defined again in a notebook."""

    class Mine(eqx.Module):
        up: Linear
        down: Linear

        def __init__(self, config, *, key):
            self.up = Linear(config.d_model, width, std=1.0, key=key)
            self.down = Linear(width, config.d_model, std=1.0, key=key)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    return Mine


def test_two_classes_of_one_name_are_two_classes():
    configs = [ModelConfig(n_layers=1, n_heads=2, d_model=16, mlp=make(n)) for n in (2, 8)]
    assert configs[0] != configs[1]
    models = [GPT(config, VOCAB, key=jax.random.key(0)) for config in configs]
    outputs = [eqx.filter_jit(lambda model, ids: model(ids))(model, IDS) for model in models]
    widths = [
        {x.shape[-2] for x in jax.tree.leaves(eqx.filter(model.stack, eqx.is_array)) if x.ndim > 2}
        for model in models
    ]
    assert 2 in widths[0]
    assert 8 in widths[1]
    assert 8 not in widths[0]
    assert outputs[0].shape == outputs[1].shape
    again = copy.deepcopy(configs[0])
    assert again == configs[0]
    assert eqx.tree_equal(GPT(again, VOCAB, key=jax.random.key(0)), models[0])
