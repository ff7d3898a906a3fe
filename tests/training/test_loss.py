import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gptlite.training.loss import cross_entropy

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
        cross_entropy(LOGITS, TARGETS, smoothing), expected, rtol=1e-5, atol=1e-5
    )


def test_cross_entropy_matches_optax():
    expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS, TARGETS)
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    np.testing.assert_allclose(cross_entropy(logits, jnp.array([1])), 2e4)


def test_a_target_that_is_no_token_gives_nan_and_a_mask_hides_it():
    targets = TARGETS.at[0, 0].set(-1).at[1, 1].set(11)
    losses = cross_entropy(LOGITS, targets)
    assert np.argwhere(np.isnan(losses)).tolist() == [[0, 0], [1, 1]]

    def masked(logits):
        return jnp.sum(
            jnp.where((targets >= 0) & (targets < 11), cross_entropy(logits, targets), 0)
        )

    grads = jax.grad(masked)(LOGITS)
    assert np.isfinite(grads).all()
    assert not grads[0, 0].any()
