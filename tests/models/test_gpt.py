import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, VOCAB, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from gptlite.config import ModelConfig, UserError
from gptlite.models.gpt import GPT

IDS = jax.random.randint(jax.random.key(2), (3, TINY.context_length), 0, VOCAB)
forward = eqx.filter_jit(lambda model, ids, key=None: model(ids, key=key))


def test_one_sequence_or_a_batch_the_same_answer(variant):
    batch = forward(variant, IDS)
    assert batch.shape == (3, TINY.context_length, VOCAB)
    for row, ids in zip(batch, IDS, strict=True):
        np.testing.assert_allclose(forward(variant, ids), row, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(forward(variant, IDS[None]), batch[None], rtol=1e-4, atol=1e-4)


@settings(max_examples=25)
@given(data=st.data())
def test_a_token_never_changes_logits_before_it(variant, data):
    row = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=12, max_size=12))
    place = data.draw(st.integers(0, 11))
    other = data.draw(st.integers(0, VOCAB - 1).filter(lambda i: i != row[place]))
    ids = jnp.array(row)
    before, after = forward(variant, ids), forward(variant, ids.at[place].set(other))
    np.testing.assert_array_equal(before[:place], after[:place])
    assert not np.array_equal(before[place], after[place])


def test_no_gradient_reaches_a_logit_from_a_later_token(variant):
    """Where a perturbation could be lost to rounding, a derivative is not."""

    @eqx.filter_jit
    def jacobian(model, x):
        def logits(x):
            hidden, _ = model.stack(model.positions(x, 0))
            return model.logits(model.norm(hidden)).sum(-1)

        return jnp.abs(jax.jacobian(logits)(x)).sum(-1)

    x = jax.random.normal(jax.random.key(3), (TINY.context_length, TINY.d_model))
    influence = np.asarray(jacobian(variant, x))
    assert np.all(np.triu(influence, k=1) == 0.0)
    assert np.all(np.tril(influence)[np.tril_indices(len(influence))] > 0.0)


def test_unrolled_and_scanned_agree_gradients_included():
    unrolled, scanned = tiny_model(), tiny_model(stack="scan")

    @eqx.filter_jit
    @eqx.filter_grad
    def grad(model):
        return jnp.sum(jnp.sin(model(IDS)))

    np.testing.assert_allclose(forward(unrolled, IDS), forward(scanned, IDS), rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grad(unrolled)), jax.tree.leaves(grad(scanned)), strict=True):
        # 1e-5 of the largest: float32 sums in another order.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()))


def test_every_parameter_has_a_gradient(variant):
    grads = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(jnp.sin(model(IDS)))))(variant)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        rows = leaf.reshape(len(leaf), -1) if "blocks" in jax.tree_util.keystr(path) else leaf[None]
        assert np.all(np.abs(np.asarray(rows)).max(axis=tuple(range(1, rows.ndim))) > 0.0), path


@pytest.mark.parametrize("which", ["dropout", "attention_dropout"])
def test_dropout_needs_a_key_and_is_a_function_of_it(which):
    model = tiny_model(**{which: 0.5})
    np.testing.assert_array_equal(forward(model, IDS), forward(tiny_model(), IDS))
    a, b = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(forward(model, IDS, a), forward(model, IDS, a))
    assert not np.allclose(forward(model, IDS, a), forward(model, IDS, b))


def test_padded_ids_are_never_predicted():
    model = GPT(TINY, VOCAB, padded_vocab_size=64, key=jax.random.key(0))
    assert model.embedding.weight.shape == (64, 16)
    assert model.head is not None
    assert model.head.weight.shape == (64, 16)
    assert forward(model, IDS).shape[-1] == VOCAB


def test_a_new_model_of_ours_predicts_all_characters_alike():
    np.testing.assert_array_equal(forward(GPT(TINY, VOCAB, key=jax.random.key(0)), IDS), 0.0)


def test_gpt2s_initialisation_is_gpt2s():
    config = dataclasses.replace(
        TINY, n_layers=8, d_model=128, init="gpt2", positions="learned", tied_head=True
    )
    model: Any = GPT(config, 500, key=jax.random.key(0))
    block = model.stack.blocks
    for weight, std in [
        (model.embedding.weight, 0.02),
        (model.positions.weight, 0.02),
        (block.attention.query.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.output.weight, 0.005),
        (block.mlp.down.weight, 0.005),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)
    assert not np.array_equal(block.mlp.up.weight[0], block.mlp.up.weight[1])


def test_a_run_in_bfloat16_stays_near_float32(variant):
    from gptlite.training.step import cast

    half = forward(cast(variant, jnp.bfloat16), IDS)
    assert half.dtype == jnp.float32
    full = forward(variant, IDS)
    # Weights and activations rounded to 8 bits at each of some ten products in a row.
    assert float(jnp.abs(half - full).mean()) < 0.05 * float(jnp.abs(full).max())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 15}, "multiple of model.n_heads, got d_model 15 and n_heads 2"),
        ({"d_model": 6}, "must be even, got 6 / 2 = 3"),
        ({"d_model": 5, "n_heads": 5, "positions": "sinusoidal"}, "must be even, got 5"),
        ({"n_layers": 0}, "n_layers must be between 1 and 10000, got 0"),
        ({"context_length": -1}, "context_length must be between 1 .*got -1"),
        ({"dropout": 1.0}, "dropout must be between 0.0 and 0.99, got 1.0"),
        ({"dropout": float("nan")}, "dropout must be between"),
        ({"d_ff": 0}, "d_ff must be between 1"),
        ({"positions": "rotray"}, "one of rotary, learned, sinusoidal, none, got 'rotray'"),
        ({"d_model": 16.0}, r"d_model must be int, got 16\.0"),
        ({"bias": 1}, "bias must be bool, got 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_a_sentence(changes, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(("vocab", "padded"), [(0, None), (-1, None), (65, 64)])
def test_an_impossible_vocabulary_is_refused(vocab, padded):
    with pytest.raises(UserError, match="vocabulary must have at least 1"):
        GPT(TINY, vocab, padded_vocab_size=padded, key=jax.random.key(0))


def test_learned_positions_end_somewhere():
    ids = jnp.zeros(TINY.context_length + 1, jnp.int32)
    with pytest.raises(ValueError, match="end at context_length 12, got a sequence of 13"):
        tiny_model(positions="learned")(ids)
    forward(tiny_model(), ids)


def test_ids_that_are_no_ids_are_refused_by_name():
    with pytest.raises(TypeCheckError, match=r"GPT\.__call__") as error:
        tiny_model()(jnp.zeros((2, 3)))
    assert "Int" in str(error.value)
    assert "'ids'" in str(error.value)


def test_the_default_width_of_the_mlp():
    assert ModelConfig(d_model=128).d_hidden == 512
    assert ModelConfig(d_model=128, mlp="swiglu").d_hidden == 344
    assert ModelConfig(d_model=128, d_ff=100).d_hidden == 100
