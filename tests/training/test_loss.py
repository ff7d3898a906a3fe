import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY, drawn

from gptlite.models.gpt import GPT
from gptlite.nn.kernels import head as head_module
from gptlite.training.loss import cross_entropy, window_losses

# Compiled as one program: operation by operation takes longer.
compiled_losses = eqx.filter_jit(cross_entropy)
LOGITS = 5 * jax.random.normal(jax.random.key(0), (4, 6, 11))
TARGETS = jax.random.randint(jax.random.key(1), (4, 6), 0, 11)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_matches_its_definition(smoothing):
    logits = np.asarray(LOGITS, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = np.full(logits.shape, smoothing / 11)
    np.put_along_axis(q, np.asarray(TARGETS)[..., None], 1 - smoothing + smoothing / 11, axis=-1)
    expected = -(q * log_p).sum(-1)
    np.testing.assert_allclose(
        compiled_losses(LOGITS, TARGETS, smoothing), expected, rtol=1e-5, atol=1e-5
    )


def test_cross_entropy_matches_optax():
    expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS, TARGETS)
    np.testing.assert_allclose(compiled_losses(LOGITS, TARGETS), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    np.testing.assert_allclose(compiled_losses(logits, jnp.array([1])), 2e4)


def test_a_target_that_is_no_token_gives_nan_and_a_mask_hides_it():
    targets = TARGETS.at[0, 0].set(-1).at[1, 1].set(11)
    losses = compiled_losses(LOGITS, targets)
    assert np.argwhere(np.isnan(losses)).tolist() == [[0, 0], [1, 1]]

    def masked(logits):
        return jnp.sum(
            jnp.where((targets >= 0) & (targets < 11), cross_entropy(logits, targets), 0)
        )

    grads = jax.jit(jax.grad(masked))(LOGITS)
    assert np.isfinite(grads).all()
    assert not grads[0, 0].any()


def plain_losses(model, windows, *, label_smoothing):
    logits, _ = model.with_aux_loss(windows[:, :-1])
    return cross_entropy(logits, windows[:, 1:], label_smoothing)


@pytest.mark.parametrize("parts", ["whole", "parts", "computed once more"])
@pytest.mark.parametrize(("tied", "cap", "smoothing"), [(True, None, 0.0), (False, 2.0, 0.1)])
def test_losses_of_windows_and_their_gradients_are_those_of_the_logits(
    monkeypatch, parts, tied, cap, smoothing
):
    """In float32, with rows of padding in the head, and losses of different weights. 21 positions
    are not divisible by the number of parts."""
    if parts != "whole":
        monkeypatch.setattr(head_module, "MAX_LOGITS", 3 * 16 * 5)  # 5 positions
    if parts == "computed once more":
        monkeypatch.setattr(head_module, "MAX_KEPT", 3 * 16 * 4)
    config = dataclasses.replace(TINY, context_length=21, tied_head=tied, logit_cap=cap)
    model = drawn(lambda key: GPT(config, 11, padded_vocab_size=16, key=key), 0.7)
    windows = jax.random.randint(jax.random.key(2), (3, 22), 0, 11)
    weights = jax.random.uniform(jax.random.key(3), (3, 21))

    def weighted(losses):
        @eqx.filter_jit
        @eqx.filter_value_and_grad(has_aux=True)
        def run(model):
            each = losses(model, windows, label_smoothing=smoothing)
            return jnp.sum(weights * each), each

        return run(model)

    def ours(model, windows, **options):
        return window_losses(model, windows, **options)[0]

    (_, found), gradient = weighted(ours)
    (_, expected), expected_gradient = weighted(plain_losses)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    expected_leaves = jax.tree.leaves(expected_gradient)
    for x, y in zip(jax.tree.leaves(gradient), expected_leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(np.asarray(y)).max())


def test_a_window_with_an_id_outside_the_vocabulary_has_a_loss_of_nan():
    """Also where the head has a row for it, which is padding."""
    model = drawn(lambda key: GPT(TINY, 11, padded_vocab_size=16, key=key))
    windows = jnp.zeros((1, 5), jnp.int32).at[0, 4].set(12)
    losses = eqx.filter_jit(window_losses)(model, windows)[0]
    assert np.isnan(losses).tolist() == [[False, False, False, True]]
