"""Models whose layers are of two kinds."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model

from gptlite.config import ModelConfig, OptimizerConfig
from gptlite.errors import UserError
from gptlite.hugging_face.architectures import to_hf_config
from gptlite.inspect.attention_maps import attention_maps
from gptlite.inspect.summary import summary
from gptlite.machine.names import CustomBlock
from gptlite.models.gpt import GPT
from gptlite.nn import Attention, Recurrence
from gptlite.nn.stack import unstacked
from gptlite.nn.variants.linear_attention import LinearAttention
from gptlite.training.optimizer import make_optimizer

IDS = jax.random.randint(jax.random.key(2), (2, TINY.context_length), 0, VOCAB)
HYBRID: dict[str, Any] = {"attention": "linear", "attention_every": "2:full"}
make = eqx.filter_jit(GPT)


@pytest.mark.parametrize("stack", ["unrolled", "scan"])
def test_two_kinds_that_are_the_same_are_a_plain_stack(stack):
    """Its parameters, too, and so are the numbers of its layers and what dropout draws."""
    config = dataclasses.replace(TINY, n_layers=5, dropout=0.5, stack=stack)
    plain = make(config, VOCAB, key=jax.random.key(0))
    hybrid = make(
        dataclasses.replace(config, attention_every="2:full"), VOCAB, key=jax.random.key(0)
    )
    layers, others = unstacked(plain).stack, unstacked(hybrid).stack
    assert eqx.tree_equal(layers, others, rtol=0, atol=1e-7)
    for key in (None, jax.random.key(1)):
        wanted, got = (eqx.filter_jit(model)(IDS, key=key) for model in (plain, hybrid))
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(("every", "kinds"), [(2, "sfsfs"), (3, "ssfss"), (5, "ssssf")])
def test_every_nth_layer_has_the_other_attention(every, kinds):
    changes = {"n_layers": 5, "attention_every": f"{every}:full", "attention": "sliding:window=3"}
    model = tiny_model(**changes)
    attentions = [block.attention for block in unstacked(model).stack.blocks]
    assert "".join("f" if a.window is None else "s" for a in attentions) == kinds


@pytest.mark.parametrize(("every", "remat"), [(2, "none"), (3, "none"), (4, "attention")])
def test_unrolled_and_scanned_agree_gradients_included(every, remat):
    changes = {"n_layers": 4, "dropout": 0.3, "attention": "linear", "attention_every": "2:full"}
    changes["attention_every"] = f"{every}:full"
    unrolled = tiny_model(**changes)
    scanned = tiny_model(**changes, stack="scan", remat=remat)

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(model):
        return jnp.sum(jnp.sin(model(IDS, key=jax.random.key(3))))

    for a, b in zip(jax.tree.leaves(grad(unrolled)), jax.tree.leaves(grad(scanned)), strict=True):
        # 1e-5 of the largest: float32 sums in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(np.asarray(a)).max())


class Numbered(Recurrence):
    """A custom attention that knows the number of its layer."""

    number: jax.Array

    def __init__(self, config, *, layer, key):
        self.number = jnp.ones(config.d_model) * layer

    def init_state(self):
        return jnp.zeros(self.number.shape)

    def step(self, state, x):
        return state, self.number


def test_most_layers_may_have_a_custom_attention_which_gets_the_number_of_its_layer():
    attention = CustomBlock("blocks.py:Numbered", Numbered)
    config = dataclasses.replace(TINY, n_layers=5, attention=attention, attention_every="2:full")
    blocks = unstacked(make(config, VOCAB, key=jax.random.key(0))).stack.blocks
    numbers = [float(blocks[i].attention.number[0]) for i in (0, 2, 4)]
    assert numbers == [0, 2, 4]
    assert isinstance(blocks[1].attention, Attention)


def test_parts_of_a_hybrid_are_named_and_counted():
    model = tiny_model(n_layers=5, **HYBRID)
    table = summary(model)
    assert "stack.blocks.base.attention.query (x 3)" in table
    assert "stack.blocks.nth.attention.heads.query (x 2)" in table
    assert isinstance(unstacked(model).stack.blocks[4].attention, LinearAttention)
    # Layers with a state have no weights.
    maps = attention_maps(model, IDS)
    assert list(maps) == [f"stack.blocks.{i}.attention" for i in (1, 3)]


def test_muon_is_for_the_matrices_of_both_kinds():
    params = eqx.filter(tiny_model(n_layers=4, **HYBRID), eqx.is_array)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1.0), params)
    step = functools.partial(jax.jit(optimizer.update), state=optimizer.init(params))
    updates, _ = step(params, params=params)
    blocks = updates.stack.blocks
    for update in (blocks.base.attention.query.weight, blocks.nth.mlp.up.weight):
        sizes = jnp.linalg.svd(update / jnp.linalg.norm(update, ord=2, axis=(-2, -1))[0])[1]
        # Newton-Schulz brings them to between 0.7 and 1.2: those of the parameters are not.
        assert float(sizes.min()) > 0.4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("4", "as in 4:full, got '4'"),
        ("1:full", "a number from 2 to 999, .* got '1:full'"),
        ("02:full", "got '02:full'"),
        ("2:fulll", "one of full, sliding, .*, got '2:fulll'"),
        ("2:blocks.py:Mine", "one of full, sliding"),
        ("4:full", "4:full needs a model.n_layers of 4 or more, got 3"),
        ("", "got ''"),
    ],
)
def test_what_is_no_number_and_attention_is_refused(value, words):
    with pytest.raises(UserError, match=words):
        ModelConfig(attention_every=value)


@pytest.mark.parametrize(
    ("attention", "every", "words"),
    [
        ("full", "2:sliding:window=0", r"window in model\.attention_every sliding must be at"),
        ("full", "2:full:qk_gain=true", r"qk_gain of model\.attention_every needs --model.qk-norm"),
        ("full:qk_gain=true", "2:full", r"qk_gain of model\.attention needs --model.qk-norm"),
        ("full:window=3", "2:full", r"model\.attention full has no option window"),
    ],
)
def test_the_options_of_both_attentions_are_checked(attention, every, words):
    changes = {"n_layers": 2, "attention": attention, "attention_every": every, "qk_norm": False}
    with pytest.raises(UserError, match=words):
        make(dataclasses.replace(TINY, **changes), VOCAB, key=jax.random.key(0))


def test_a_hybrid_that_no_architecture_has_cannot_be_exported():
    words = r"attention linear with another one \(--model.attention gated_deltanet\)"
    with pytest.raises(UserError, match=words):
        to_hf_config(ModelConfig(**HYBRID), VOCAB)
