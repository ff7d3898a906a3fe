import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gptlite.config import SamplingConfig
from gptlite.errors import UserError
from gptlite.generation import sampling
from gptlite.generation.sampling import Sampling
from gptlite.nn.kernels.drawing import BLOCK, FEW

# Compiled as one program: operation by operation takes longer.
candidates, sample = eqx.filter_jit(sampling.candidates), eqx.filter_jit(sampling.sample)


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


def test_a_filter_that_keeps_all_takes_no_time():
    """OpenAI's clients send their defaults."""
    everything = [SamplingConfig(top_p=1.0, min_p=0.0), SamplingConfig(1.0)]
    assert Sampling.of(everything).filters is None
    filters = Sampling.of([SamplingConfig(top_p=1.0, top_k=3)]).filters
    assert filters is not None
    assert filters.top_p[0] > 1  # what `last_kept` takes for none


def drawn_with(config, logits, uniform):
    return sample(logits, Sampling.of([config] * len(logits)), uniform)


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
    kept = candidates(row, Sampling.of([config]))[0]
    ids = np.flatnonzero(np.isfinite(kept))
    assert set(ids.tolist()) == reference(row[0], config)
    np.testing.assert_allclose(kept[ids], ((row[0] - row.max()) / temperature)[ids])


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(top_k=5),
        SamplingConfig(top_k=2 * FEW),
        SamplingConfig(top_p=0.5),
        SamplingConfig(top_p=0.99, top_k=700),
    ],
    ids=str,
)
def test_filters_of_a_large_vocabulary_keep_what_the_reference_keeps(config):
    """Where the few best suffice, and where they do not, which another row decides."""
    random = np.random.default_rng(0)
    flat = random.integers(0, 3, 5 * FEW) / 16
    peaked = flat + 12.0 * (random.random(5 * FEW) < 0.01)
    rows = jnp.asarray([flat, peaked], jnp.float32)
    both = candidates(rows, Sampling.of([config] * 2))
    for row, kept in zip(rows, both, strict=True):
        assert set(np.flatnonzero(np.isfinite(kept)).tolist()) == reference(row, config)
        alone = candidates(row[None], Sampling.of([config]))[0]
        np.testing.assert_array_equal(alone, kept)


def test_rows_have_settings_of_their_own():
    configs = [
        SamplingConfig(),
        SamplingConfig(greedy=True),
        SamplingConfig(top_k=3),
        SamplingConfig(0.5, top_p=0.7),
        SamplingConfig(2.0, min_p=0.3),
    ]
    logits = jax.random.normal(jax.random.key(0), (len(configs), 40))
    for seed in range(20):
        uniform = jax.random.uniform(jax.random.key(seed), (len(configs),))
        together = sample(logits, Sampling.of(configs), uniform)
        for i, config in enumerate(configs):
            alone = drawn_with(config, logits[i : i + 1], uniform[i : i + 1])
            assert int(alone[0]) == int(together[i])


@pytest.mark.parametrize("vocab", [4 * BLOCK + 1, 5 * BLOCK])
def test_a_draw_from_blocks_is_the_inverse_of_the_cumulative_sum(vocab):
    logits = np.random.default_rng(0).normal(0, 3, vocab).astype(np.float32)
    uniform = jnp.linspace(0, 1 - 2.0**-24, 2_000)
    drawn = drawn_with(SamplingConfig(), jnp.tile(jnp.asarray(logits), (2_000, 1)), uniform)
    sums = np.cumsum(np.exp(logits.astype(np.float64)))
    # Where the token drawn begins and ends, in [0, 1): float32's rounding of sums is near 1e-6.
    begins, ends = (np.concatenate([[0], sums]) / sums[-1])[np.stack([drawn, drawn + 1])]
    assert (begins - 1e-5 <= uniform).all()
    assert (uniform <= ends + 1e-5).all()


def test_draws_follow_the_filtered_distribution():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.3, 0.15]]))
    uniform = jax.random.uniform(jax.random.key(0), (20_000,))
    drawn = drawn_with(SamplingConfig(top_k=3), jnp.tile(logits, (20_000, 1)), uniform)
    share = np.bincount(drawn, minlength=5) / 20_000
    # Four standard errors of a share near 0.4.
    np.testing.assert_allclose(share, np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85, atol=0.014)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_the_ends_of_the_unit_interval_draw_nothing_excluded(filters):
    """The first and the last number that a uniform draw can give."""
    logits = jnp.log(jnp.array([[0.001, 0.4, 0.049, 0.3, 0.249, 0.001]] * 2))
    drawn = drawn_with(SamplingConfig(**filters), logits, jnp.array([0.0, 1 - 2.0**-24]))
    assert set(drawn.tolist()) <= {1, 3, 4}


def test_no_sum_over_a_large_vocabulary_rounds_up_to_an_excluded_token():
    logits = jnp.full((256, 50_000), -20.0).at[:, ::1000].set(0.0)
    uniform = jnp.linspace(1 - 1e-4, 1 - 2.0**-24, 256)
    drawn = drawn_with(SamplingConfig(min_p=0.5), logits, uniform)
    assert set((drawn % 1000).tolist()) == {0}


def test_a_sum_that_rounding_increases_after_the_last_token_kept_excludes_nothing_else():
    """The sum of all is then above the sum at every token kept, and so may be the number drawn."""
    vocab, random = 20_000, np.random.default_rng(0)
    logits = random.uniform(-0.6, 0.0, (64, vocab)).astype(np.float32)
    logits[random.random((64, vocab)) < 0.3] = -20.0
    logits[:, 0] = logits[:, -50:] = -20.0
    drawn = drawn_with(SamplingConfig(min_p=0.5), jnp.asarray(logits), jnp.full(64, 1 - 2.0**-23))
    assert (logits[np.arange(64), drawn] > -1).all()


def test_greedy_is_the_most_probable_token():
    logits = jax.random.normal(jax.random.key(0), (6, 9))
    uniform = jax.random.uniform(jax.random.key(1), (6,))
    greedy = drawn_with(SamplingConfig(greedy=True), logits, uniform)
    np.testing.assert_array_equal(greedy, logits.argmax(-1))
    np.testing.assert_array_equal(greedy, drawn_with(SamplingConfig(top_k=1), logits, uniform))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0.0, got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k must be at least 0 .*got -1"),
        ({"top_p": 0.0}, "top_p must be above 0.0 and at most 1.0, got 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p must be at least 0.0 and at most 1.0, got -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        SamplingConfig(**settings)


def test_zero_is_greedy_or_off():
    """As OpenAI's API, vLLM, llama.cpp and Hugging Face have it."""
    logits = jax.random.normal(jax.random.key(0), (50, 40))
    uniform = jax.random.uniform(jax.random.key(1), (50,))
    cold, greedy, off, plain = (
        drawn_with(config, logits, uniform)
        for config in (
            SamplingConfig(temperature=0.0, top_k=7),
            SamplingConfig(greedy=True),
            SamplingConfig(top_k=0),
            SamplingConfig(),
        )
    )
    np.testing.assert_array_equal(cold, greedy)
    np.testing.assert_array_equal(off, plain)
    assert (np.asarray(cold) != np.asarray(plain)).any()
