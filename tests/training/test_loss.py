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
