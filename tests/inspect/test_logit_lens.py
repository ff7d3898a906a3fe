"""What each layer would predict."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_model

from gptlite.inspect.logit_lens import logit_lens, residual_stream
from gptlite.nn.stack import unstacked

IDS = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def test_the_last_layer_predicts_what_the_model_does(variant):
    """Of every kind of block; with layers that are scanned or not. 1e-4: float32, in programs that
    may add in another order."""
    lens = eqx.filter_jit(logit_lens)(variant, IDS)
    assert lens.shape == (variant.config.n_layers + 1, 2, 5, variant.vocab_size)
    np.testing.assert_allclose(lens[-1], eqx.filter_jit(variant)(IDS), atol=1e-4)


@pytest.mark.parametrize("stack", ["scan", "unrolled"])
def test_a_layer_predicts_what_a_model_without_the_later_ones_does(stack):
    stacked = tiny_model(stack=stack, n_layers=2)
    model = unstacked(stacked)
    lens = eqx.filter_jit(logit_lens)(stacked, IDS)

    @eqx.filter_jit
    def predicted(shorter):
        hidden = shorter.stack(residual_stream(model, IDS)[0])[0]
        return model.logits(model.norm(hidden))

    for count in range(model.config.n_layers + 1):
        shorter = eqx.tree_at(lambda m: m.stack.blocks, model, model.stack.blocks[:count])
        np.testing.assert_allclose(lens[count], predicted(shorter), atol=1e-4)
