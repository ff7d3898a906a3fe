"""Linear recurrences whose state is a matrix, in chunks of tokens that are made of products.

The reference is `token_by_token`. For each head, with a state `S: [d_key, d_value]`,

    S = decay_t ⊙ S + write_t (read_tᵀ S) + k_t v_tᵀ,    or with strength_t k_t for write_t
    y_t = Sᵀ q_t

where `decay_t`, between 0 and 1, is a number or one for each row of S. Linear attention, RetNet,
GLA and Mamba-2 have no `read`. A delta rule reads what the state has for a key, and takes it away.

The fast form is that of Yang et al., 2024, "Parallelizing linear transformers with the delta rule
over sequence length", section 3, with decays. In a chunk, with `A_ij` the product of the decays
after token j up to token i, what is read, `u_i = read_iᵀ S_{i-1}`, solves a triangular system,

    u_i = (A_{i-1,0} ⊙ read_i)ᵀ S_0 + Σ_{j<i} (read_iᵀ (A_{i-1,j} ⊙ write_j)) u_j
                                    + Σ_{j<i} (read_iᵀ (A_{i-1,j} ⊙ k_j)) v_j,

and outputs are sums of the same kind. No decay is divided by, as in the papers: a product of decays
is the exponential of a sum of their logarithms over its own tokens, so it neither overflows, nor
loses its digits beside a decay near 0.

`python benchmarks/token_scan.py gated_deltanet --context 2048` has the gain: docs/blocks.md.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from gptlite.errors import require
from gptlite.nn.dtypes import widen

# Tokens in a chunk: a power of two.
CHUNK = 32

State = Float[Array, "*batch d_key d_value"]


class Tokens(NamedTuple):
    """What the recurrence is given of each token. All have the same number of axes, of which the
    leading ones, such as batch and heads, may have a size of 1 for all."""

    query: Float[Array, "*batch seq d_key"]
    key: Float[Array, "*batch seq d_key"]
    value: Float[Array, "*batch seq d_value"]
    log_decay: Float[Array, "*batch seq rows"]
    """At most 0; minus infinity for a decay of 0. `rows` is 1 or d_key."""
    read: Float[Array, "*batch seq d_key"] | None = None
    write: Float[Array, "*batch seq d_key"] | None = None
    """With `read`, there is this one or the next."""
    strength: Float[Array, "*batch seq 1"] | None = None
    """Such a number times the token's key in place of `write`."""
    begins: Bool[Array, "*batch seq"] | None = None
    """Whether the state is zero before the token, as where a document begins."""
    is_real: Bool[Array, "*batch seq"] | None = None
    """False for padding, which leaves the state as it is."""


def linear_recurrence(
    tokens: Tokens, state: State
) -> tuple[Float[Array, "*batch seq d_value"], State]:
    """The outputs, and the state after all tokens, in at least float32. A single token is a step
    of `token_by_token`.

    **Raises:** `UserError` (while tracing) if an array has not the axes that `Tokens` names.
    """
    _check(tokens, state)
    tokens, state = _widened(tokens), widen(state)
    # So that 0 times it is 0.
    tokens = tokens._replace(log_decay=jnp.maximum(tokens.log_decay, -1e30))
    if tokens.is_real is not None:
        real = tokens.is_real[..., None]
        write, strength = (
            None if a is None else jnp.where(real, a, 0) for a in (tokens.write, tokens.strength)
        )
        tokens = tokens._replace(
            key=jnp.where(real, tokens.key, 0),
            log_decay=jnp.where(real, tokens.log_decay, 0),
            write=write,
            strength=strength,
            begins=None if tokens.begins is None else tokens.begins & tokens.is_real,
            is_real=None,
        )
    seq = tokens.query.shape[-2]
    if seq == 1:
        return token_by_token(tokens, state)
    return in_chunks(tokens, state, min(CHUNK, 1 << (seq - 1).bit_length()))


def _check(tokens: Tokens, state: State) -> None:
    *batch, d_key, d_value = state.shape
    seq = (1, 1, *tokens.query.shape)[-2]
    last = dict.fromkeys(("query", "key", "read", "write"), (d_key,)) | {
        "value": (d_value,),
        "log_decay": sorted({1, d_key}),
        "strength": (1,),
        "begins": (),
        "is_real": (),
    }
    for name, widths in last.items():
        if (array := getattr(tokens, name)) is None:
            continue
        leading, rest = array.shape[: len(batch)], array.shape[len(batch) :]
        width = [" or ".join(map(str, widths))] if widths else []
        require(
            all(n in (1, size) for n, size in zip(leading, batch, strict=False))
            and rest in ([(seq, width) for width in widths] or [(seq,)]),
            f"Of Tokens, {name} must be [{', '.join(map(str, [*batch, seq, *width]))}] for a state "
            f"of {list(state.shape)}, or 1 in place of a leading size, got {list(array.shape)}.",
        )
    changes = [a is not None for a in (tokens.write, tokens.strength)]
    require(
        sum(changes) == (tokens.read is not None),
        "Of Tokens, read needs either write or strength, which need read.",
    )


def token_by_token(
    tokens: Tokens, state: State
) -> tuple[Float[Array, "*batch seq d_value"], State]:
    """The reference, without padding."""

    def step(state: Array, token: Tokens) -> tuple[Array, Array]:
        if token.begins is not None:
            state = jnp.where(token.begins[..., None, None], 0, state)
        after = jnp.exp(token.log_decay)[..., None] * state
        if token.read is not None:
            write: Any = token.write if token.strength is None else token.strength * token.key
            found = jnp.einsum("...kv,...k->...v", state, token.read)
            after += write[..., None] * found[..., None, :]
        after += token.key[..., None] * token.value[..., None, :]
        return after, jnp.einsum("...kv,...k->...v", after, token.query)

    axis = tokens.query.ndim - 2
    if tokens.query.shape[axis] == 1:
        state, y = step(state, jax.tree.map(lambda a: jnp.squeeze(a, axis), tokens))
        return y[..., None, :], state
    state, y = lax.scan(step, state, jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), tokens))
    return jnp.moveaxis(y, 0, axis), state


def in_chunks(
    tokens: Tokens, state: State, size: int
) -> tuple[Float[Array, "*batch seq d_value"], State]:
    """The same, in chunks of `size` tokens, a power of two: all of them at once, but for the states
    between them."""
    seq, axis = tokens.query.shape[-2], tokens.query.ndim - 2
    chunks = jax.tree.map(lambda a: _cut(a, axis, size), tokens)
    query, key, value, log_decay = chunks[:4]
    read, strength, begins = chunks.read, chunks.strength, chunks.begins
    if begins is not None:  # what it would take away is masked
        log_decay = jnp.where(begins[..., None], 0, log_decay)
    decayed = query * jnp.exp(log_decay)
    rows = [decayed] if read is None else [decayed, read]
    columns = [key] if chunks.write is None else [key, chunks.write]
    scores, before, after = _scores(rows, columns, log_decay)
    # How much is left of the incoming state at each token and at the end, and of what a token adds.
    at_token, at_end = jnp.exp(before), jnp.exp(after)
    whole = jnp.exp(jnp.sum(log_decay, axis=-2))
    if begins is not None:
        document = jnp.cumsum(begins, axis=-1)
        same = document[..., :, None] == document[..., None, :]
        scores = [[score * same for score in of_row] for of_row in scores]
        at_token *= (document == 0)[..., None]
        at_end *= (document == document[..., -1:])[..., None]
        whole *= (document[..., -1] == 0)[..., None]

    # A token's query also finds what the token adds.
    by_key = scores[0][0] + _diagonal(query, key)
    from_start, ending, turn = at_token * decayed, _t(at_end * key), None
    if read is None:
        y, leaves = by_key @ value, ending @ value
    else:
        # What is read: u = by_state S_0 + alone.
        system = scores[1][1] if strength is None else scores[1][0] * _t(strength)
        inverse = _inverse(system)
        by_state, alone = inverse @ (at_token * read), inverse @ (scores[1][0] @ value)
        if strength is not None:  # it is added along the key, as the value is
            by_state, value = strength * by_state, value + strength * alone
            y, leaves = by_key @ value, ending @ value
            from_start, turn = from_start + by_key @ by_state, ending @ by_state
        else:
            write = cast(Array, chunks.write)
            by_write, ends = scores[0][1] + _diagonal(query, write), _t(at_end * write)
            y, leaves = by_key @ value + by_write @ alone, ending @ value + ends @ alone
            from_start, turn = from_start + by_write @ by_state, ends @ by_state

    def pass_on(state: Array, chunk: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        whole, leaves, turn = chunk
        after = whole[..., None] * state + leaves
        return after if turn is None else after + turn @ state, state

    between = jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), (whole, leaves, turn))
    state, states = lax.scan(pass_on, state, between)
    y += from_start @ jnp.moveaxis(states, 0, axis)
    *batch, count, _, d_value = y.shape
    return y.reshape(*batch, count * size, d_value)[..., :seq, :], state


def _scores(
    rows: list[Array], columns: list[Array], log_decay: Float[Array, "*chunks size rows"]
) -> tuple[list[list[Float[Array, "... size size"]]], Array, Array]:
    """For each of `rows` and each of `columns`, `[*chunks, size, d_key]`:
    `row_iᵀ (A_{i-1,j} ⊙ column_j)`, and 0 where j is not before i. And the sums of `log_decay` over
    the tokens before each one, and after each one."""
    size = log_decay.shape[-2]
    if log_decay.shape[-1] == 1:
        earlier = jnp.tril(jnp.ones((size, size), log_decay.dtype), -1)
        sum_up = functools.partial(jnp.matmul, precision="highest")
        # At [t, j], the logarithm of t if it is after j, so that sums over t are from j on.
        kept = earlier * jnp.exp(sum_up(earlier, earlier * log_decay))
        scores = [[(row @ _t(column)) * kept for column in columns] for row in rows]
        return scores, sum_up(earlier, log_decay), sum_up(earlier.T, log_decay)
    # Blocks of 1, 2, 4 ... tokens. On the way from a token of one to a token of the next, the
    # border is passed: the decay is the product of those before it and those after it.
    total = log_decay[..., None, :]
    before = after = jnp.zeros_like(total)
    scores = [[_zero_scores(row, column, log_decay) for column in columns] for row in rows]
    while (half := before.shape[-2]) < size:
        totals, befores, afters = _pair(total), _pair(before), _pair(after)
        late = [jnp.exp(befores[1]) * _pair(_blocks(row, half))[1] for row in rows]
        early = [_t(jnp.exp(afters[0]) * _pair(_blocks(column, half))[0]) for column in columns]
        scores = [
            [
                _triangular(first, row @ column, second)
                for (first, second), column in zip(map(_pair, of_row), early, strict=True)
            ]
            for of_row, row in zip(scores, late, strict=True)
        ]
        total = totals[0] + totals[1]
        before = jnp.concatenate([befores[0], totals[0] + befores[1]], axis=-2)
        after = jnp.concatenate([afters[0] + totals[1], afters[1]], axis=-2)
    scores = [[score[..., 0, :, :] for score in of_row] for of_row in scores]
    return scores, before[..., 0, :, :], after[..., 0, :, :]


def _zero_scores(*arrays: Float[Array, "..."]) -> Float[Array, "*chunks size 1 1"]:
    """Of each token with itself."""
    shape = jnp.broadcast_shapes(*(a.shape[:-1] for a in arrays))
    return jnp.zeros((*shape, 1, 1), arrays[-1].dtype)


@jax.custom_jvp
def _inverse(below: Float[Array, "*chunks size size"]) -> Float[Array, "*chunks size size"]:
    """That of the identity minus a matrix which is zero on and above its diagonal, by halves. (A
    triangular solver of the CPU's library takes longer, and has threads of its own.)"""
    size = below.shape[-1]
    if size == 1:
        return jnp.ones_like(below)
    half = size // 2
    corner = below[..., half:, :half]
    # Along the axis of chunks: the CPU's library may crash where arrays have nine axes.
    both = jnp.concatenate([below[..., :half, :half], below[..., half:, half:]], axis=-3)
    first, second = jnp.split(_inverse(both), 2, axis=-3)
    low = jnp.matmul(jnp.matmul(second, corner, precision="highest"), first)
    return _triangular(first, low, second)


@_inverse.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = _inverse(*primals)
    return inverse, inverse @ tangents[0] @ inverse


def _triangular(first: Array, low: Array, second: Array) -> Array:
    """The matrix of four blocks, of which the upper right one is zero."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([low, second], axis=-1)], axis=-2)


def _diagonal(a: Array, b: Array) -> Array:
    return jnp.eye(a.shape[-2], dtype=a.dtype) * jnp.sum(a * b, axis=-1, keepdims=True)


def _t(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _blocks(x: Float[Array, "*chunks size d"], size: int) -> Float[Array, "*chunks blocks _ d"]:
    *chunks, tokens, d = x.shape
    return x.reshape(*chunks, tokens // size, size, d)


def _pair(x: Float[Array, "*chunks blocks size d"]) -> tuple[Array, Array]:
    """The blocks of even numbers, and those of odd ones."""
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _cut(x: Array, axis: int, size: int) -> Array:
    """The axis of tokens as chunks of `size`. What is added at the end, zeros, leaves the state as
    it is: a logarithm of 0 is a decay of 1."""
    count = -(-x.shape[axis] // size)
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, count * size - x.shape[axis])
    return jnp.pad(x, pads).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])


def _widened(tokens: Tokens) -> Tokens:
    return jax.tree.map(lambda a: a if a.dtype == bool else widen(a), tokens)
