import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gptlite.config import SamplingConfig, UserError
from gptlite.generation.sampling import candidates, sample


def reference(logits, config):
    """The ids kept of one row, by sorting and counting."""
    logits = np.asarray(logits, np.float32) / np.float32(config.temperature)
    order = np.argsort(-logits, kind="stable")
    if config.top_k is not None:
        order = order[: config.top_k]
    if config.top_p is not None:
        p = np.exp(logits[order].astype(np.float64) - logits.max())
        p /= p.sum()
        reached = np.concatenate([[0.0], np.cumsum(p)[:-1]])
        order = order[reached < config.top_p]
    if config.min_p is not None and config.min_p > 0:
        order = order[logits[order] >= logits.max() + np.log(config.min_p)]
    return set(order.tolist())


@given(
    # Multiples of 1/16 make ties, and sums that no rounding can put on the other side of a bound.
    logits=st.lists(st.integers(-80, 80), min_size=16, max_size=16),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 5, 16, 40]),
    top_p=st.none() | st.floats(0.01, 1.0),
    min_p=st.none() | st.floats(0.0, 1.0),
)
def test_filters_keep_exactly_what_the_reference_keeps(logits, temperature, top_k, top_p, min_p):
    config = SamplingConfig(temperature, top_k, top_p, min_p)
    row = jnp.asarray([logits], jnp.float32) / 16
    kept, ids = candidates(row, config)
    assert set(ids[0][jnp.isfinite(kept[0])].tolist()) == reference(row[0], config)
    np.testing.assert_allclose(
        kept[0][jnp.isfinite(kept[0])],
        ((row[0] - row.max()) / temperature)[ids[0]][jnp.isfinite(kept[0])],
    )


def test_draws_follow_the_filtered_distribution():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    uniform = jax.random.uniform(jax.random.key(0), (20_000,))
    drawn = sample(jnp.tile(logits, (20_000, 1)), SamplingConfig(top_k=3), uniform)
    share = np.bincount(drawn, minlength=5) / 20_000
    # Four standard errors of a share near 0.4.
    np.testing.assert_allclose(share, np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85, atol=0.014)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_the_ends_of_the_unit_interval_draw_nothing_excluded(filters):
    """The first and the last number that a uniform draw can give."""
    logits = jnp.log(jnp.array([[0.001, 0.4, 0.049, 0.3, 0.249, 0.001]] * 2))
    drawn = sample(logits, SamplingConfig(**filters), jnp.array([0.0, 1 - 2.0**-24]))
    assert set(drawn.tolist()) <= {1, 3, 4}


def test_no_sum_over_a_large_vocabulary_rounds_up_to_an_excluded_token():
    logits = jnp.full((256, 50_000), -20.0).at[:, ::1000].set(0.0)
    uniform = jnp.linspace(1 - 1e-4, 1 - 2.0**-24, 256)
    drawn = sample(logits, SamplingConfig(min_p=0.5), uniform)
    assert set((drawn % 1000).tolist()) == {0}


def test_a_sum_that_rounding_increases_after_the_last_token_kept_excludes_nothing_else():
    """The sum of all is then above the sum at every token kept, and so may be the number drawn."""
    vocab, random = 20_000, np.random.default_rng(0)
    logits = random.uniform(-0.6, 0.0, (64, vocab)).astype(np.float32)
    logits[random.random((64, vocab)) < 0.3] = -20.0
    logits[:, 0] = logits[:, -50:] = -20.0
    drawn = sample(jnp.asarray(logits), SamplingConfig(min_p=0.5), jnp.full(64, 1 - 2.0**-23))
    assert (logits[np.arange(64), drawn] > -1).all()


def test_greedy_is_the_most_probable_token():
    logits = jax.random.normal(jax.random.key(0), (6, 9))
    uniform = jax.random.uniform(jax.random.key(1), (6,))
    greedy = sample(logits, SamplingConfig(greedy=True), uniform)
    np.testing.assert_array_equal(greedy, logits.argmax(-1))
    np.testing.assert_array_equal(greedy, sample(logits, SamplingConfig(top_k=1), uniform))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature must be at least 1e-06, got -1.0"),
        ({"temperature": 0.0}, "temperature must be at least 1e-06, got 0.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be at least 1 .*got 0"),
        ({"top_p": 0.0}, "top_p must be above 0.0 and at most 1.0, got 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p must be at least 0.0 and at most 1.0, got -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        SamplingConfig(**settings)
