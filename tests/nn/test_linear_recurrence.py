"""The recurrence in chunks is the one token by token, in values and in gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptlite.errors import UserError
from gptlite.nn.kernels.linear_recurrence import (
    Tokens,
    linear_recurrence,
    token_by_token,
)

HEADS, D_KEY, D_VALUE = 2, 8, 6
# Relative errors, of values and of gradients: the norm of the difference against that of the array.
LIMITS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
# What a recurrence has: decays for each row of the state or one for all; what is read; documents.
KINDS = {
    "retention": {"rows": 1},
    "gated": {"rows": D_KEY},
    "delta": {"rows": 1, "write": 1},
    "delta of rows": {"rows": D_KEY, "write": 1},
    "two vectors": {"rows": D_KEY, "write": D_KEY},
    "documents": {"rows": 1, "documents": True},
    "delta, documents": {"rows": D_KEY, "write": D_KEY, "documents": True},
    "strong gates": {"rows": D_KEY, "write": 1, "gates": 10.0},
    "weak gates": {"rows": D_KEY, "write": 1, "gates": 0.01},
    "turned signs": {"rows": 1, "write": 1, "factor": 2.0, "decays": (1e-2, 1e-4)},
    "near 0 and 1": {"rows": D_KEY, "write": 1, "decays": (1e4, 1e-4)},
}


def make(seq, rows, write=0, documents=False, gates=1.0, decays=None, factor=1.0, batch=(2,)):
    random = np.random.default_rng(seq)
    draw = functools.partial(random.normal, size=(*batch, HEADS, seq, D_KEY))
    key = draw()
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    log_decay = -np.log1p(np.exp(gates * draw()))[..., :rows]
    if decays is not None:
        log_decay = -np.where(draw()[..., :rows] > 0, *decays)
    strength = factor / (1 + np.exp(-gates * draw()[..., :1]))
    # (I - b k kᵀ) diag(a): what is read has decayed.
    read = np.exp(log_decay) * key if write else None
    vector = -strength * key + 0.02 * draw()
    begins = random.random((*batch, 1, seq)) < 0.05 if documents else None
    arrays: list[Any] = [
        draw() / D_KEY**0.5,
        key,
        random.normal(size=(*batch, HEADS, seq, D_VALUE)),
        log_decay,
        read,
        *{0: (None, None), 1: (None, -strength), D_KEY: (vector, None)}[write],
        begins,
    ]
    return Tokens(*arrays), random.normal(size=(*batch, HEADS, D_KEY, D_VALUE))


def cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, None if a.dtype == bool else dtype), tree)


@functools.partial(jax.jit, static_argnums=0)
def run(recurrence, tokens, state, weights):
    """Outputs, the state, and the gradients of a weighted sum of both."""
    floats, rest = tokens._replace(begins=None), tokens.begins

    def weighted(floats, state):
        y, after = recurrence(floats._replace(begins=rest), state)
        total = sum(jnp.sum(a * w) for a, w in zip((y, after), weights, strict=True))
        return total, (y, after)

    grads, values = jax.grad(weighted, (0, 1), has_aux=True)(floats, state)
    return jax.tree.leaves((values, grads))


def error(value, wanted):
    value, wanted = np.asarray(value, np.float64), np.asarray(wanted)
    return np.linalg.norm(value - wanted) / max(np.linalg.norm(wanted), 1e-30)


EACH = [(kind, 75) for kind in KINDS]
# No chunk divides these lengths.
LONG = [(kind, seq) for kind in ("gated", "delta, documents") for seq in (1, 63, 500, 1500)]


@pytest.mark.parametrize(("kind", "seq"), EACH + LONG)
def test_chunks_are_the_tokens_one_by_one(kind, seq):
    with jax.enable_x64(True):
        tokens, state = make(seq, **KINDS[kind])
        random = np.random.default_rng(1)
        weights = cast([random.normal(size=a.shape) for a in (tokens.value, state)], "float32")
        wanted = run(token_by_token, *cast((tokens, state), "float64"), weights)
        for dtype, limit in LIMITS.items():
            given, start = cast((tokens, state), dtype)
            if dtype == "bfloat16":  # a model has sums, such as logarithms of decays, in float32
                given = given._replace(log_decay=cast(tokens.log_decay, "float32"))
            got = run(linear_recurrence, given, start, weights)
            errors = [error(*pair) for pair in zip(got, wanted, strict=True)]
            assert max(errors) < limit, (dtype, errors)


def test_the_reference_is_its_formula():
    with jax.enable_x64(True):
        tokens, state = make(30, D_KEY, D_KEY, documents=True, batch=(2, 3))
        y, last = token_by_token(*cast((tokens, state), "float64"))
        begins = np.asarray(tokens.begins)
        assert begins[..., 1:].any()
        for row in np.ndindex(2, 3, HEADS):
            q, k, v, log_decay, read, write = (a[row] for a in tokens[:6] if a is not None)
            s = state[row]
            for t in range(30):
                if begins[(*row[:2], 0, t)]:
                    s = np.zeros_like(s)
                s = np.diag(np.exp(log_decay[t])) @ s + np.outer(write[t], read[t] @ s)
                s = s + np.outer(k[t], v[t])
                np.testing.assert_allclose(y[(*row, t)], s.T @ q[t], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(last[row], s, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [1, D_KEY])
def test_a_decay_of_0_forgets(rows):
    tokens, state = cast(make(70, rows, 1), "float32")
    sudden = jnp.where(tokens.log_decay < -1, -jnp.inf, tokens.log_decay)
    tokens = tokens._replace(log_decay=sudden, read=jnp.exp(sudden) * tokens.key)
    y, last = linear_recurrence(tokens, state)
    wanted = token_by_token(tokens, state)
    assert max(error(*pair) for pair in zip((y, last), wanted, strict=True)) < 1e-5


def test_a_vector_with_one_channel_is_no_number():
    tokens, state = cast(make(30, 1, D_KEY), "float32")
    narrow = jax.tree.map(lambda a: a[..., :1], tokens)._replace(value=tokens.value)
    one = narrow._replace(write=None, strength=narrow.write / narrow.key)
    for given in (narrow, one):
        y, _ = linear_recurrence(given, state[..., :1, :])
        assert error(y, token_by_token(narrow, state[..., :1, :])[0]) < 1e-5
    s, q, k, v, read, write = (
        state[0, 0, 0],
        *(a[0, 0] for a in (narrow.query, narrow.key, narrow.value, narrow.read, narrow.write)),
    )
    for t in range(30):
        s = np.exp(narrow.log_decay[0, 0, t]) * s + write[t] * read[t] * s + k[t] * v[t]
        np.testing.assert_allclose(y[0, 0, t], s * q[t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"log_decay": jnp.zeros((2, HEADS, 9))},
            r"log_decay must be \[2, 2, 9, 1 or 8\] for a state of \[2, 2, 8, 6\], or 1 in place",
        ),
        (
            {"log_decay": jnp.zeros((2, HEADS, 9, 3))},
            r"log_decay must .*, 1 or 8\] for .*, got \[2, 2, 9, 3\]",
        ),
        ({"key": jnp.zeros((2, HEADS, 1, D_KEY))}, r"key must be \[2, 2, 9, 8\] for"),
        ({"key": jnp.zeros((3, HEADS, 9, D_KEY))}, r"key must be \[2, 2, 9, 8\] for"),
        ({"value": jnp.zeros((2, HEADS, 9, 2))}, r"value must be \[2, 2, 9, 6\] for"),
        ({"begins": jnp.zeros(9, bool)}, r"begins must be \[2, 2, 9\] for .* got \[9\]"),
        ({"is_real": jnp.zeros((2, HEADS, 1), bool)}, "is_real must be .* got"),
        ({"strength": None}, "read needs either write or strength"),
        ({"read": None}, "read needs either"),
        ({"write": jnp.zeros((2, HEADS, 9, D_KEY))}, "read needs either"),
        ({"query": jnp.zeros(8)}, r"query must be .* got \[8\]"),
        ({"query": jnp.zeros((2, HEADS, 9, 3))}, r"query must be \[2, 2, 9, 8\] for"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, words):
    tokens, state = cast(make(9, 1, 1), "float32")
    with pytest.raises(UserError, match=words):
        linear_recurrence(tokens._replace(**change), state)


def test_a_state_that_does_not_fit_is_named():
    tokens, state = cast(make(9, 1, 1), "float32")
    with pytest.raises(UserError, match=r"query must be \[1, 2, 9, 8\] for a state of"):
        linear_recurrence(tokens, state[:1])


def without_padding(tokens):
    """Padding as tokens that add nothing and forget nothing."""
    if tokens.is_real is None:
        return tokens
    names = ("key", "log_decay", "write")
    nothing = {n: jnp.where(tokens.is_real[..., None], getattr(tokens, n), 0) for n in names}
    return tokens._replace(begins=tokens.begins & tokens.is_real, is_real=None, **nothing)


@pytest.mark.parametrize("kind", ["retention", "gated", "delta", "delta, documents"])
def test_an_array_may_be_for_all_rows_and_heads(kind):
    """Each of them by itself, and all others."""
    tokens, state = cast(make(40, **KINDS[kind]), "float32")
    if tokens.begins is not None:
        begins = np.zeros((2, 1, 40), bool)
        begins[0, 0, 4] = begins[1, 0, 6] = begins[1, 0, 35] = True
        is_real = np.arange(40) < np.array([38, 33])[:, None, None]
        tokens = tokens._replace(begins=jnp.asarray(begins), is_real=jnp.asarray(is_real))
    names = [name for name, array in tokens._asdict().items() if array is not None]
    for few in [[name] for name in names] + [[n for n in names if n != x] for x in names]:
        some = {name: getattr(tokens, name)[:1, :1] for name in few}
        whole = {name: jnp.broadcast_to(a, (2, HEADS, *a.shape[2:])) for name, a in some.items()}
        got = linear_recurrence(tokens._replace(**some), state)
        wanted = token_by_token(without_padding(tokens._replace(**whole)), state)
        assert [a.shape for a in got] == [a.shape for a in wanted]
        assert max(error(*pair) for pair in zip(got, wanted, strict=True)) < 1e-5, few


@pytest.mark.parametrize("kind", ["retention", "delta, documents"])
@pytest.mark.parametrize(("batch", "seq"), [(0, 9), (2, 0)])
def test_nothing_gives_nothing(kind, batch, seq):
    tokens, state = cast(make(seq, **KINDS[kind], batch=(batch,)), "float32")
    y, last = linear_recurrence(tokens, state)
    assert y.shape == tokens.value.shape
    assert jnp.array_equal(last, state)


@pytest.mark.parametrize("kind", ["gated", "delta, documents"])
def test_padding_leaves_the_state_as_it_is(kind):
    tokens, state = cast(make(70, **KINDS[kind], batch=(3,)), "float32")
    lengths = np.array([0, 37, 70])
    is_real = jnp.arange(70) < lengths[:, None, None]
    y, last = linear_recurrence(tokens._replace(is_real=is_real), state)
    for row, length in enumerate(lengths):
        alone = jax.tree.map(lambda a, row=row, n=length: a[row, :, :n], tokens)
        wanted, after = token_by_token(alone, state[row])
        assert error(y[row, :, :length], wanted) < 1e-5
        assert error(last[row], after) < 1e-5


def test_a_hundred_thousand_tokens_in_one_sequence():
    tokens, state = cast(make(100_000, 1, 1, decays=(1.0, 1e-6), batch=()), "float32")
    (y, last), (wanted, after) = (
        jax.jit(recurrence)(tokens, state) for recurrence in (linear_recurrence, token_by_token)
    )
    assert error(y, wanted) < 1e-4
    assert error(last, after) < 1e-4
