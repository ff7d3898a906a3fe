"""Low-rank adapters, against the product written out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VARIANTS, VOCAB, tiny_model

from gptlite.adapters import LoRALinear, merged, with_adapters
from gptlite.config import ModelConfig
from gptlite.errors import UserError
from gptlite.machine.names import MATRICES, LoRA, parse_lora
from gptlite.nn.linear import Linear

IDS = jax.random.randint(jax.random.key(2), (3, TINY.context_length), 0, VOCAB)
LORA = LoRA(rank=3, alpha=1.5, matrices=MATRICES)
KEY = jax.random.key(5)
forward = eqx.filter_jit(lambda model, ids: model(ids))


def is_adapter(node) -> bool:
    return isinstance(node, LoRALinear)


def adapters(model) -> list[LoRALinear]:
    return [node for node in jax.tree.leaves(model, is_leaf=is_adapter) if is_adapter(node)]


def trained(model):
    """`model` with adapters that change something."""

    random = np.random.default_rng(0)

    def change(node):
        if not is_adapter(node):
            return node
        up = random.normal(size=node.lora_up.shape) / node.lora_up.shape[-1]
        up = jnp.asarray(up.astype(np.float32))
        return eqx.tree_at(lambda layer: layer.lora_up, node, up)

    return jax.tree.map(change, model, is_leaf=is_adapter)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_formula(bias):
    layer = Linear(6, 4, std=0.5, bias=bias, key=KEY)
    if bias:
        layer = eqx.tree_at(lambda layer: layer.bias, layer, jnp.arange(4.0))
    adapted = trained(LoRALinear(layer, LORA, key=KEY))
    x = jax.random.normal(KEY, (2, 3, 6))
    w, a, b = (
        np.asarray(y, np.float64) for y in (layer.weight, adapted.lora_down, adapted.lora_up)
    )
    expected = np.asarray(x, np.float64) @ (w + 1.5 / 3 * (b @ a)).T + bias * np.arange(4)
    # A few sums of float32.
    np.testing.assert_allclose(forward(adapted, x), expected, rtol=1e-5, atol=1e-5)
    alone = adapted.merged()
    assert type(alone) is Linear
    np.testing.assert_allclose(forward(alone, x), expected, rtol=1e-5, atol=1e-5)
    assert (alone.bias is None) == (not bias)


@pytest.mark.parametrize("name", VARIANTS)
def test_adapters_change_nothing_at_first_and_merge_later(name):
    model = tiny_model(**VARIANTS[name])
    adapted = with_adapters(model, LORA, key=KEY)
    # On a CPU, queries, keys and values are one product, and three with adapters.
    np.testing.assert_allclose(forward(adapted, IDS), forward(model, IDS), rtol=1e-4, atol=1e-6)
    adapted = trained(adapted)
    logits = forward(adapted, IDS)
    assert not np.allclose(logits, forward(model, IDS), atol=1e-3)
    # Sums of float32 in another order.
    np.testing.assert_allclose(forward(merged(adapted), IDS), logits, rtol=1e-3, atol=1e-4)
    assert not adapters(merged(adapted))
    assert jax.tree.structure(merged(adapted)) == jax.tree.structure(model)


def test_adapters_are_beside_the_matrices_that_are_named():
    model = tiny_model(n_layers=2, mlp="swiglu", bias=True)
    everything = adapters(with_adapters(model, LORA, key=KEY))
    assert len(everything) == 7
    assert all(layer.lora_down.shape[:2] == (2, 3) for layer in everything)
    draws = [np.asarray(layer.lora_down).ravel()[:8].tolist() for layer in everything]
    assert len({tuple(draw) for draw in draws}) == 7
    some = with_adapters(model, parse_lora("2:matrices=query+down"), key=KEY)
    blocks: Any = some.stack.blocks
    assert isinstance(blocks.attention.heads.query, LoRALinear)
    assert isinstance(blocks.mlp.down, LoRALinear)
    assert len(adapters(some)) == 2
    with pytest.raises(UserError, match="no layer of this model has a Linear named gate"):
        with_adapters(tiny_model(), parse_lora("2:matrices=gate"), key=KEY)


def test_the_words_of_the_option_are_read():
    assert parse_lora("8") == LoRA(rank=8, alpha=16.0, matrices=MATRICES)
    assert parse_lora("4:alpha=2.5:matrices=query+value") == LoRA(4, 2.5, ("query", "value"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "must be a rank"),
        ("x", "must be a rank"),
        ("8:beta=1", "must be a rank"),
        ("8:alpha=x", "must be a rank"),
        ("0", "rank must be at least 1"),
        ("-1", "rank must be at least 1"),
        ("10001", "at most 10000"),
        ("8:alpha=0", "alpha must be above 0"),
        ("8:alpha=nan", "must be a rank"),
        ("8:alpha=1-2", "alpha must be above 0"),
        ("8:alpha=1e400", r"alpha must be above 0\.0 and at most"),
        ("8:alpha=", "must be a rank"),
        ("1" + 400 * "0", "must be a rank"),
        ("8:matrices=query+head", r"must be some of query\+key\+value"),
        ("8:matrices=query+query", r"must be some of query\+key\+value"),
    ],
)
def test_other_words_are_refused(value, said):
    with pytest.raises(UserError, match=said):
        ModelConfig(lora=value)
