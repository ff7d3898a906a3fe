"""Each law bites: a planted mistake is caught by it and named, and the honest twin passes it."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support.blocks
from jax import lax
from jax.core import Tracer
from support.blocks import D, Layer, OneHead, RunningMean

from gptlite.errors import UserError
from gptlite.models.build import make_part
from gptlite.models.gpt import GPT
from gptlite.nn import MLP, WHOLE_SEQUENCE, Heads, Linear, Recurrence, RMSNorm
from gptlite.nn.cache import write_at
from gptlite.nn.mlp import relu2
from gptlite.research.check_block import SMALL, CheckError, check_block
from gptlite.research.sizes import sizes_of


def caught(block: Any, law: str, **options: Any) -> str:
    """The law's message."""
    with pytest.raises(CheckError) as found:
        check_block(block, checks=[law], **options)
    assert found.value.checks == (law,)
    return found.value.failures[law]


def holds(block: Any, law: str, **options: Any) -> None:
    assert check_block(block, checks=[law], **options).checks == (law,)


# Grouped queries.


class Grouped(eqx.Module):
    """Attention with heads that share keys, by `repeat`."""

    heads: Heads
    dropout: float = eqx.field(static=True)

    def __init__(self, config, *, key):
        self.heads = Heads(
            config.d_model,
            config.n_heads,
            n_kv_heads=config.n_kv_heads,
            std=0.5,
            output_std=0.5,
            key=key,
        )
        self.dropout = config.attention_dropout

    def init_cache(self, batch, capacity, dtype):
        kv_heads = self.heads.key.weight.shape[0] // self.heads.d_head
        return (jnp.zeros((*batch, kv_heads, capacity, self.heads.d_head), dtype),) * 2

    def repeated(self, x, times, cached):
        return jnp.repeat(x, times, axis=-3)

    def drop(self, weights, key):
        return eqx.nn.Dropout(self.dropout)(weights, key=key, inference=key is None)

    def scores(self, q, k):
        return (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32) / self.heads.d_head**0.5

    def parts(self, x, cache, context):
        q, k, v = (self.heads.split(y) for y in self.heads.qkv(x, fused=False))
        start = jnp.asarray(context.start)
        if cache is not None:
            pairs = zip(cache, (k, v), strict=True)
            cache = k, v = tuple(write_at(old, new, start, axis=-2) for old, new in pairs)
        times = q.shape[-3] // k.shape[-3]
        k, v = (self.repeated(y, times, cache is not None) for y in (k, v))
        places = start[..., None] + jnp.arange(q.shape[-2])
        seen = (jnp.arange(k.shape[-2]) <= places[..., None])[..., None, :, :]
        return jax.nn.softmax(jnp.where(seen, self.scores(q, k), -1e9)), v, cache

    def weights(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        return self.parts(x, cache, context)[0]

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        weights, v, cache = self.parts(x, cache, context)
        return self.heads.join(self.drop(weights, key).astype(v.dtype) @ v), cache


class TiledWhenCached(Grouped):
    def repeated(self, x, times, cached):
        if not cached:
            return super().repeated(x, times, cached)
        return jnp.concatenate([x] * times, axis=-3)


def test_heads_tiled_where_they_are_repeated():
    assert "decoding token by token differs" in caught(TiledWhenCached, "cached")
    holds(Grouped, "cached")


# Gradients.


def scaled(factor):
    """The identity, with a gradient that is `factor` times as large."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, grad: (factor * grad,))
    return identity


class ScaledInput(Layer):
    factor: float = eqx.field(static=True, default=1.05)

    def __call__(self, x):
        return super().__call__(scaled(self.factor)(x))


class ScaledParameter(Layer):
    def __call__(self, x):
        up = eqx.tree_at(lambda up: up.weight, self.up, scaled(1.01)(self.up.weight))
        return self.down(jax.nn.gelu(up(x)))


class ScaledBehindASmallGain(Layer):
    gain: jax.Array
    factor: float = eqx.field(static=True, default=2.0)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.gain = jnp.full(config.d_model, 1e-6)

    def __call__(self, x):
        return x + self.gain.astype(x.dtype) * super().__call__(scaled(self.factor)(x))


class HonestBehindASmallGain(ScaledBehindASmallGain):
    factor: float = eqx.field(static=True, default=1.0)


@jax.custom_vjp
def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _normed_forward(x):
    return normed(x), x


def _normed_backward(x, grad):  # without the term of the mean
    return (grad / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6),)


normed.defvjp(_normed_forward, _normed_backward)


class NormWithoutTheMeansTerm(Layer):
    def __call__(self, x):
        return super().__call__(normed(x))


class StraightThrough(Layer):
    """Rounded, with the gradient of what was not rounded (Bengio et al., 2013)."""

    def __call__(self, x):
        y = super().__call__(x)
        return y + lax.stop_gradient(jnp.round(4 * y) / 4 - y)


class BinaryWeights(Layer):
    def __call__(self, x):
        w = self.up.weight
        signs = w + lax.stop_gradient(jnp.sign(w) - w)
        return self.down(jax.nn.gelu(x @ signs.T.astype(x.dtype)))


class TopK(Layer):
    """The four largest of the hidden numbers."""

    def __call__(self, x):
        h = self.up(x)
        kept = lax.top_k(jnp.abs(h), 4)[0][..., -1:]
        return self.down(jnp.where(jnp.abs(h) >= kept, h, 0))


class Float32Carry(Layer):
    """A carry that is float32, whatever the input is."""

    factor: float = eqx.field(static=True, default=1.0)

    def __call__(self, x):
        def step(carry, x):
            carry = 0.5 * carry + x.astype(jnp.float32)
            return carry, carry

        y = jnp.moveaxis(scaled(self.factor)(super().__call__(x)), -2, 0)
        _, y = lax.scan(step, jnp.zeros(y.shape[1:], jnp.float32), y)
        return jnp.moveaxis(y, 0, -2).astype(x.dtype)


class WrongFloat32Carry(Float32Carry):
    factor: float = eqx.field(static=True, default=1.02)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (ScaledInput, "the gradient of the input is wrong"),
        (ScaledParameter, "the gradient of up.weight is wrong"),
        (ScaledBehindASmallGain, "the gradient of the input is wrong"),
        (NormWithoutTheMeansTerm, "the gradient of the input is wrong"),
        (WrongFloat32Carry, "is wrong"),
    ],
)
def test_wrong_gradients(bug, words):
    message = caught(bug, "gradients")
    assert words in message
    assert "look at a custom_vjp" in message


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(
    "block", [StraightThrough, BinaryWeights, TopK, Float32Carry, HonestBehindASmallGain]
)
def test_right_gradients(block, seed):
    holds(block, "gradients", seed=seed)


def test_what_has_no_derivative_is_said():
    report = check_block(StraightThrough, checks=["gradients"])
    assert "gradients of the input" in report.left_out
    assert "the output jumps" in str(report)
    assert list(check_block(TopK, checks=["gradients"]).left_out) == ["more than 41 tokens"]


@jax.custom_vjp
def dropped(weights, kept):
    return jnp.where(kept, weights / 0.8, 0)


dropped.defvjp(lambda weights, kept: (dropped(weights, kept), None), lambda _, grad: (grad, None))


class ForgetsTheMaskBackwards(Grouped):
    """A kernel whose backward pass lets everything through."""

    def drop(self, weights, key):
        if key is None:
            return weights
        return dropped(weights, jax.random.bernoulli(key, 0.8, weights.shape))


@jax.custom_vjp
def masked(v, real):
    return jnp.where(real, v, 0)


masked.defvjp(lambda v, real: (masked(v, real), None), lambda _, grad: (grad, None))


class ReachesPaddingBackwards(RunningMean):
    """The mean of all real tokens, in a kernel whose backward pass forgets which those are."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=key)
        v = masked(self.value(x), self.real(x, context))
        pooled = jnp.sum(v, axis=-2, keepdims=True)
        return y + pooled.astype(y.dtype), cache


class HalvesInBfloat16(Layer):
    def __call__(self, x):
        return super().__call__(scaled(0.5 if x.dtype == jnp.bfloat16 else 1.0)(x))


def test_wrong_gradients_beyond_whole_sequences_in_float32():
    words = ", with padding and a key, is wrong"
    assert words in caught(ForgetsTheMaskBackwards, "gradients")
    assert words in caught(ReachesPaddingBackwards, "gradients", causal=False)
    assert "in bfloat16 the gradient of" in caught(HalvesInBfloat16, "bfloat16")
    for block in (Grouped, RunningMean):
        holds(block, "gradients")
        holds(block, "bfloat16")


class LeaksBackwards(OneHead):
    """Right forward; the backward pass mixes positions."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=key)
        return leaking(y), cache


@jax.custom_vjp
def leaking(y):
    return y


leaking.defvjp(lambda y: (y, None), lambda _, grad: (grad + 0.1 * jnp.roll(grad, 1, axis=-2),))


def test_a_leak_in_the_backward_pass():
    assert "reaches later inputs" in caught(LeaksBackwards, "backward")
    holds(OneHead, "backward")


class LeaksThroughAGate(Layer):
    gate: jax.Array

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.gate = jnp.array(-16.0)

    def __call__(self, x):
        mean = jnp.mean(x, axis=-2, keepdims=True)
        return super().__call__(x) + jax.nn.sigmoid(self.gate).astype(x.dtype) * mean


def test_a_leak_through_a_gate_that_is_shut():
    assert "depends on inputs from position" in caught(LeaksThroughAGate, "causal")


class MaskOf30(OneHead):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32) / 40
        seen = self.mask(q.shape[-2], k.shape[-2], 0)
        return self.mix(self.softmax(jnp.where(seen, scores, scores - 30)), v), cache


def test_a_mask_that_large_scores_pass():
    assert "30 times as large" in caught(MaskOf30, "causal")


# What must be seen.


class BlindToItself(OneHead):
    def mask(self, queries, keys, start):
        seen = super().mask(queries, keys, start - 1)
        return seen.at[..., 0, 0].set(True) if isinstance(start, int) else seen


class Window(OneHead):
    window: int = eqx.field(static=True, default=8)

    def mask(self, queries, keys, start):
        places = jnp.asarray(start)[..., None] + jnp.arange(queries)
        seen = jnp.arange(keys) > places[..., None] - self.window
        return seen & super().mask(queries, keys, start)


class WindowShortByOne(Window):
    window: int = eqx.field(static=True, default=7)


def test_a_sequence_is_longer_than_the_window_that_is_said():
    message = caught(OneHead, "sees", sees="window(64)")
    assert message.startswith("the output at position 64 depends on the input at 0")
    with pytest.raises(UserError, match=r"seq must be at least 65 to check window\(64\), got 40"):
        check_block(OneHead, sees="window(64)", seq=40)


class Documents(OneHead):
    """Attention that keeps documents apart."""

    def same(self, starts, keys):
        return jnp.arange(keys) >= starts[..., None]

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        starts = context.document_starts
        if starts is None:
            return super().__call__(x, cache, context, key=key)
        q, k, v = self.query(x), self.key(x), self.value(x)
        if cache is not None:
            cache = k, v = self.write(cache, (k, v), context.start)
        seen = self.mask(q.shape[-2], k.shape[-2], context.start) & self.same(starts, k.shape[-2])
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.promote_types(q.dtype, jnp.float32)) / 4
        return self.mix(self.softmax(jnp.where(seen, scores, -1e9)), v), cache


class LastDocumentForAll(Documents):
    def same(self, starts, keys):
        return super().same(jnp.broadcast_to(starts[..., -1:], starts.shape), keys)


class DocumentsOfTheFirstRow(Documents):
    def same(self, starts, keys):
        return super().same(starts if starts.ndim == 1 else starts[:1], keys)


class MixesDocumentsWhenCached(Documents):
    def same(self, starts, keys):
        right = super().same(starts, keys)
        return right if keys == starts.shape[-1] else jnp.ones_like(right)


class Sums(Recurrence):
    def __init__(self, config, *, key):
        del config, key

    def init_state(self):
        return jnp.zeros(D)

    def step(self, state, x):
        return state + x, state


class BeginsInPadding(Sums):
    """A document that begins in the padding of a prompt clears the state."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, after = super().__call__(x, cache, context)
        if cache is None or context.document_starts is None or context.lengths is None:
            return y, after
        steps = jnp.arange(x.shape[-2])
        begins = context.document_starts == context.start + steps
        begins &= steps >= context.lengths[..., None]
        return y, jnp.where(begins.any(-1)[..., None], 0, after)


def test_documents():
    config = dataclasses.replace(SMALL, separate_documents=True)
    for bug in (LastDocumentForAll, DocumentsOfTheFirstRow):
        message = caught(bug, "documents", config=config)
        assert message.startswith("a document between others (see context.document_starts)")
    message = caught(MixesDocumentsWhenCached, "documents", config=config)
    assert message.startswith("decoding a document between others (see")
    message = caught(BeginsInPadding, "documents", config=config)
    assert message.startswith("decoding a document between others, with padding in which")
    holds(Documents, "documents", config=config)


def test_seeing_too_little_or_too_much():
    holds(OneHead, "sees", sees="all earlier")
    holds(Window, "sees", sees="window(8)")
    message = caught(BlindToItself, "sees", sees="all earlier")
    assert "the output at position 1 does not depend on the input at 1" in message
    message = caught(WindowShortByOne, "sees", sees="window(8)")
    assert "the output at position 7 does not depend on the input at 0" in message
    message = caught(OneHead, "sees", sees=lambda out, place: place in (out, 0))
    assert "the output at position 2 depends on the input at 1" in message
    with pytest.raises(UserError, match=r"sees must be 'all earlier', 'window\(64\)' or"):
        check_block(OneHead, sees="window")
    assert "all earlier, window(64)" in check_block(OneHead, checks=["sees"]).left_out["sees"]


# Far positions.


class Ring(Window):
    """A cache of the last tokens alone, in a ring."""

    window: int = eqx.field(static=True, default=8)
    room: int = eqx.field(static=True, default=8)

    def init_cache(self, batch, capacity, dtype):
        keys = jnp.zeros((*batch, self.room, D), dtype)
        return keys, keys, jnp.full((*batch, self.room), -1, jnp.int32)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        if cache is None:
            return super().__call__(x, None, context, key=key)
        seq, batch = x.shape[-2], x.shape[:-2]
        start = jnp.broadcast_to(jnp.asarray(context.start), batch)
        lengths = seq if context.lengths is None else context.lengths
        lengths = jnp.broadcast_to(jnp.asarray(lengths), batch)
        q, k = (self.positions(layer(x), context.start) for layer in (self.query, self.key))
        v, steps = self.value(x), jnp.arange(seq)
        places = start[..., None] + steps
        old_k, old_v, old_places = cache
        k, v = jnp.concatenate([old_k, k], -2), jnp.concatenate([old_v, v], -2)
        real = jnp.where(steps < lengths[..., None], places, -1)
        all_places = jnp.concatenate([old_places, real], -1)
        distance = places[..., None] - all_places[..., None, :]
        seen = (distance >= 0) & (distance < self.window) & (all_places[..., None, :] >= 0)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32) / 4
        y = self.mix(self.softmax(jnp.where(seen, scores, -1e9)), v)
        # The last tokens are kept.
        last = jnp.argsort(all_places, axis=-1)[..., -self.room :]
        take = functools.partial(jnp.take_along_axis, indices=last[..., None], axis=-2)
        return y, (take(k), take(v), jnp.take_along_axis(all_places, last, -1))


class RingTooSmall(Ring):
    room: int = eqx.field(static=True, default=6)


class Window20(Window):
    window: int = eqx.field(static=True, default=20)


class CachedWindow20IsShorter(Window20):
    def mask(self, queries, keys, start):
        window = 20 if isinstance(start, int) else 19
        places = jnp.asarray(start)[..., None] + jnp.arange(queries)
        seen = jnp.arange(keys) > places[..., None] - window
        return seen & OneHead.mask(self, queries, keys, start)


class Table(Layer):
    """A bias for each of the first positions, and none after them."""

    table: jax.Array
    size: int = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.size = 100
        self.table = jax.random.normal(key, (self.size, config.d_model))

    def __call__(self, x):
        places = jnp.minimum(jnp.arange(x.shape[-2]), self.size - 1)
        later = x[..., -1:, :] if x.shape[-2] > self.size else 0 * x[..., -1:, :]
        return super().__call__(x) + self.table[places].astype(x.dtype) + later


class PositionsInHalfPrecision(OneHead):
    def positions(self, x, start):
        places = (jnp.asarray(start)[..., None] + jnp.arange(x.shape[-2])).astype(x.dtype)
        angle = places[..., None] * (0.5 ** jnp.arange(0, 8, dtype=x.dtype))
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = x[..., :8], x[..., 8:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def test_what_begins_far_away():
    assert "decoding" in caught(RingTooSmall, "cached")
    assert "decoding" in caught(CachedWindow20IsShorter, "cached")
    assert "at position" in caught(Table, "causal")
    assert "after 768 tokens" in caught(PositionsInHalfPrecision, "bfloat16")
    for block in (Ring, Window20):
        holds(block, "cached")
    holds(OneHead, "bfloat16")


class RowForEachPlace(OneHead):
    """A learned table of positions, as long as the context."""

    table: jax.Array

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.table = jax.random.normal(key, (config.context_length, D))

    def rows(self, start, seq):
        return self.table[jnp.asarray(start)[..., None] + jnp.arange(seq)]

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        x = x + self.rows(context.start, x.shape[-2]).astype(x.dtype)
        return super().__call__(x, cache, context, key=key)


class LastRowTwice(RowForEachPlace):
    def rows(self, start, seq):
        start = jnp.asarray(start)[..., None]
        last = jnp.where(start == 0, len(self.table) - 1, len(self.table) - 2)
        return self.table[jnp.minimum(start + jnp.arange(seq), last)]


def test_a_table_is_filled_to_its_last_row():
    message = caught(LastRowTwice, "cached")
    assert message.startswith("with a context_length of 41, decoding")
    holds(RowForEachPlace, "cached")


SIZE = 64


def half(size):
    return size // 2


class LeaksBeyond(OneHead):
    """A size in a global number, or in the code of a function."""

    def size(self) -> int:
        return SIZE

    def mask(self, queries, keys, start):
        seen = super().mask(queries, keys, start)
        later = jnp.arange(keys) <= jnp.asarray(start)[..., None] + jnp.arange(queries) + 1
        return seen if keys <= self.size() else later[..., None, :] | seen


class LeaksBeyondHalf(LeaksBeyond):
    def size(self) -> int:
        return half(200)


class LeaksFar(LeaksBeyond):
    def size(self) -> int:
        return 7 * 100  # Python keeps the product


class LeaksFarAway(LeaksBeyond):
    def size(self) -> int:
        return 2000


def test_sizes_in_the_code():
    for block in (LeaksBeyond, LeaksBeyondHalf):
        assert "depends on inputs" in caught(block, "causal")
    report = check_block(LeaksFarAway, checks=["causal"])
    assert report.left_out["more than 73 tokens"] == (
        "seq looks at what begins later, such as at 2000, which it holds"
    )
    message = caught(LeaksFar, "causal")
    assert message.startswith("in a sequence of 1024 tokens, the output at position")
    report = check_block(OneHead, checks=["causal"])
    assert report.left_out["more than 41 tokens"] == "seq looks at what begins later"


def number(default=90):
    return default


def inside(size):
    return lambda: size


class Sizes(Layer):
    """Where a number may be that is a size."""

    constant = 91
    in_tuples = (92, (93,))
    partial = functools.partial(number, 94)
    closure = inside(95)

    def in_defaults(self, size=96):
        return size

    def in_code(self):
        return [(97, 98), lambda: 99]

    def of_a_module(self):
        return support.blocks.D + support.blocks.sizes_for_tests()


def test_where_sizes_are_looked_for():
    sizes: Any = Sizes
    found = sizes_of(sizes(key=jax.random.key(0)))
    assert set(range(90, 100)) | {D, 101} <= found
    assert not {x for x in found if x > 101}


class CacheOfTheContext(OneHead):
    """A cache as long as the context, and a place less: its length is no array's."""

    room: int = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.room = config.context_length - 1

    def init_cache(self, batch, capacity, dtype):
        return super().init_cache(batch, self.room, dtype)


class LastPlace(OneHead):
    """The cache has a place less than asked for."""

    def init_cache(self, batch, capacity, dtype):
        return super().init_cache(batch, capacity - 1, dtype)


def test_a_cache_is_filled_to_its_last_place():
    assert "update shape must be smaller than operand shape" in caught(LastPlace, "cached")
    # An error is told, too, where the context is as long as the sequence.
    message = caught(CacheOfTheContext, "cached")
    assert "update shape" in message or "with a context_length of 41" in message


# Caches.


class DtypeDrifts(RunningMean):
    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, D), dtype), jnp.zeros((*batch, 1), dtype)


class StateInTheModelsFormat(RunningMean):
    """Rounded at each token that is decoded."""

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, D), dtype), jnp.zeros((*batch, 1), dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, after = super().__call__(x, cache, context, key=key)
        if cache is not None and after is not None:
            pairs = zip(after, cache, strict=True)
            after = tuple(new.astype(old.dtype) for new, old in pairs)
        return y, after


def test_a_state_is_not_rounded_at_each_token():
    message = caught(StateInTheModelsFormat, "bfloat16")
    assert message.startswith("in bfloat16 the output after 384 tokens of one sign, decoded one by")
    holds(RunningMean, "bfloat16")


class Count(eqx.Module):
    """The mean of all values, from their sum and a counter."""

    value: Linear
    count: Any = eqx.field(static=True, default=jnp.int32)

    def __init__(self, config=SMALL, *, key):
        self.value = Linear(config.d_model, config.d_model, std=0.5, key=key)
        self.count = type(self).count

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, D)), jnp.zeros(batch, jnp.int32)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        lengths = jnp.asarray(x.shape[-2] if context.lengths is None else context.lengths)
        real = jnp.broadcast_to(jnp.arange(x.shape[-2]) < lengths[..., None], x.shape[:-1])
        v = jnp.where(real[..., None], self.value(x).astype(jnp.float32), 0)
        total, count = jnp.cumsum(v, axis=-2), jnp.cumsum(real, axis=-1)
        if cache is not None:
            total, count = cache[0][..., None, :] + total, cache[1][..., None] + count
            cache = total[..., -1, :], count[..., -1].astype(self.count)
        y = total / jnp.maximum(count, 1)[..., None].astype(total.dtype)
        return y.astype(x.dtype), cache


class CountDrifts(Count):
    count: Any = eqx.field(static=True, default=jnp.int8)


class ReturnsNoCache(OneHead):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        return super().__call__(x, cache, context, key=key)[0], None


class Permutes(Layer):
    """By whole numbers that NumPy made: they have 64 bits."""

    order: np.ndarray

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.order = np.random.default_rng(0).permutation(config.d_model)

    def __call__(self, x):
        return super().__call__(x[..., self.order])


def test_whole_numbers_of_numpy():
    assert {"gradients", "bfloat16", "extremes"} <= set(check_block(Permutes).checks)


class DropsTheSecondAxis(OneHead):
    def write(self, cache, new, start):
        if jnp.ndim(start) > 1:
            start = jnp.broadcast_to(jnp.asarray(start)[:, :1], jnp.shape(start))
        return super().write(cache, new, start)


def test_caches_keep_their_form():
    message = caught(DtypeDrifts, "cached")
    assert message.startswith("in bfloat16, a cache of bfloat16[3, 16]")
    message = caught(CountDrifts, "cached")
    assert message.endswith("int32[3] is returned as one of float32[3, 16], int8[3].")
    assert caught(ReturnsNoCache, "cached").endswith("is returned as one of nothing.")
    holds(Count, "cached")
    holds(RunningMean, "cached")


def test_two_batch_axes_with_a_cache():
    assert "two batch axes" in caught(DropsTheSecondAxis, "cached")
    holds(OneHead, "cached")


# Auxiliary losses.


class WithLoss(Layer):
    """A balance of two halves: a mean over rows, each over its own tokens."""

    def values(self, x):
        return jnp.mean(self.up(x).astype(jnp.float32) ** 2, axis=-1)

    def over_rows(self, losses):
        return jnp.mean(losses)

    def real(self, x, lengths):
        lengths = jnp.asarray(x.shape[-2] if lengths is None else lengths)
        return jnp.arange(x.shape[-2]) < lengths[..., None]

    def aux_loss(self, x, lengths=None):
        real = self.real(x, lengths)
        total = jnp.sum(jnp.where(real, self.values(x), 0), axis=-1)
        return self.over_rows(total / jnp.maximum(jnp.sum(real, axis=-1), 1))


class LossOfPadding(WithLoss):
    def real(self, x, lengths):
        return jnp.ones(x.shape[:-1], bool)


class LossIsASum(WithLoss):
    def over_rows(self, losses):
        return jnp.sum(losses)


class LossWithoutGradient(WithLoss):
    def values(self, x):
        return lax.stop_gradient(super().values(x))


class LossOverflows(WithLoss):
    def values(self, x):
        return jnp.log(jnp.sum(jnp.exp(self.up(x).astype(jnp.float32)), axis=-1)) ** 2


class LossOfNothing(WithLoss):
    def values(self, x):
        p = jax.nn.softmax(self.up(x).astype(jnp.float32))
        return jnp.sum(p * jnp.log(p), axis=-1)


class LossWithTwiceItsGradient(WithLoss):
    def values(self, x):
        return scaled(2.0)(super().values(x))


class LossIsNaN(WithLoss):
    def aux_loss(self, x, lengths=None):
        real = self.real(x, lengths)
        total = jnp.sum(jnp.where(real, self.values(x), 0), axis=-1)
        return self.over_rows(total / jnp.sum(real, axis=-1))


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (LossOfPadding, "with padding"),
        (LossIsASum, "of all rows twice"),
        (LossWithoutGradient, "has no gradient"),
        (LossIsNaN, "not finite"),
        (LossOverflows, "not finite for inputs 30 times as large"),
        (LossOfNothing, "not finite for inputs 30 times as large"),
    ],
)
def test_auxiliary_losses(bug, words):
    assert words in caught(bug, "auxiliary")


def test_a_right_auxiliary_loss():
    holds(WithLoss, "auxiliary")
    holds(WithLoss, "gradients")
    message = caught(LossWithTwiceItsGradient, "gradients")
    assert message.startswith("the gradient of up.weight by the auxiliary loss is wrong")


# Numbers.


class NoMaximum(OneHead):
    def softmax(self, scores):
        e = jnp.exp(scores)
        return e / jnp.sum(e, axis=-1, keepdims=True)


class MaximumOfTheMasked(OneHead):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32)
        seen = self.mask(q.shape[-2], k.shape[-2], 0)
        e = jnp.where(seen, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0)
        return self.mix(e / jnp.sum(e, axis=-1, keepdims=True), v), cache


class NoEpsilon(Layer):
    def __call__(self, x):
        return super().__call__(x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)))


class VarianceThatCancels(Layer):
    def __call__(self, x):
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(x**2, axis=-1, keepdims=True) - mean**2
        return super().__call__((x - mean) / jnp.sqrt(variance + 1e-6))


class NoGradientAtZero(Layer):
    def __call__(self, x):
        return super().__call__(x) * jnp.linalg.norm(x, axis=-1, keepdims=True)


class ProductOfDecays(Layer):
    """A gated sum, of what was divided by the product of all gates."""

    def __call__(self, x):
        gate = jax.nn.sigmoid(x.astype(jnp.float32))
        decay = jnp.cumprod(gate, axis=-2)
        return super().__call__((decay * jnp.cumsum(x / decay, axis=-2)).astype(x.dtype))


class SumsInHalfPrecision(Layer):
    def __call__(self, x):
        def step(total, x):
            total = total + x
            return total, total

        _, sums = lax.scan(step, jnp.zeros_like(x[..., 0, :]), jnp.moveaxis(x, -2, 0))
        return super().__call__(jnp.moveaxis(sums, 0, -2))


@pytest.mark.parametrize(
    ("bug", "law"),
    [
        (NoMaximum, "extremes"),
        (MaximumOfTheMasked, "extremes"),
        (NoEpsilon, "extremes"),
        (VarianceThatCancels, "extremes"),
        (NoGradientAtZero, "extremes"),
        (ProductOfDecays, "extremes"),
        (SumsInHalfPrecision, "bfloat16"),
    ],
)
def test_numbers(bug, law):
    assert caught(bug, law)


@pytest.mark.parametrize("block", [OneHead, Layer, RunningMean])
def test_right_numbers(block):
    holds(block, "extremes")


class EmptyRows(OneHead):
    """Hides padding, and so everything of a row that has nothing else."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.float32)
        seen = self.mask(q.shape[-2], k.shape[-2], 0)
        if context.lengths is not None:
            seen = seen & (jnp.arange(k.shape[-2]) < context.lengths[..., None, None])
        return self.mix(self.softmax(jnp.where(seen, scores, -jnp.inf)), v), cache


class LastOfAnEmptyRow(RunningMean):
    """Keeps the sum up to the last real token, which an empty row does not have."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, new = super().__call__(x, cache, dataclasses.replace(context, lengths=None), key=key)
        if cache is None or context.lengths is None:
            return y, new
        v = self.value(x).astype(jnp.float32)
        last = jnp.broadcast_to(context.lengths - 1, x.shape[:-2])[..., None, None]
        total = jnp.take_along_axis(jnp.cumsum(v, axis=-2), last, axis=-2)[..., 0, :]
        lengths = jnp.broadcast_to(context.lengths, x.shape[:-2])[..., None]
        return y, (cache[0] + total, cache[1] + lengths)


def test_rows_without_tokens():
    assert "not finite, where a row" in caught(EmptyRows, "lengths")
    assert "different length in each row" in caught(LastOfAnEmptyRow, "cached")
    holds(OneHead, "lengths")


# Dropout.


class NoRescaling(Grouped):
    def drop(self, weights, key):
        if key is None:
            return weights
        return weights * jax.random.bernoulli(key, 1 - self.dropout, weights.shape)


class WrongShare(Grouped):
    def drop(self, weights, key):
        if key is None:
            return weights
        return weights * jax.random.bernoulli(key, self.dropout, weights.shape) / self.dropout


class KeyIsIgnored(Grouped):
    def drop(self, weights, key):
        return super().drop(weights, None if key is None else jax.random.key(0))


class NeverOn(Grouped):
    def drop(self, weights, key):
        return weights


class AlikeInAllRows(Grouped):
    def drop(self, weights, key):
        if key is None:
            return weights
        kept = jax.random.bernoulli(key, 1 - self.dropout, weights.shape[-3:])
        return weights * kept / (1 - self.dropout)


class OneKeyForAllUses(Grouped):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=None)
        return self.drop(y, key) + self.drop(x, key), cache


class SameNumberFoldedIn(Grouped):
    number: int = eqx.field(static=True, default=0)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=None)
        if key is not None:
            y = self.drop(y, jax.random.fold_in(key, 0))
            x = self.drop(x, jax.random.fold_in(key, self.number))
        return y + x, cache


class AnotherNumberFoldedIn(SameNumberFoldedIn):
    number: int = eqx.field(static=True, default=1)


class SplitTwice(Grouped):
    """Two splits of one key, of which other parts are used."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=None)
        keys = [None if key is None else jax.random.split(key)[i] for i in range(2)]
        return self.drop(y, keys[0]) + self.drop(x, keys[1]), cache


class KeysOfItsOwn(Grouped):
    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        y, cache = super().__call__(x, cache, context, key=keys[0])
        return self.drop(y, keys[1]) + self.drop(x, keys[2]), cache


class AlwaysOn(Grouped):
    def drop(self, weights, key):
        return super().drop(weights, jax.random.key(0) if key is None else key)


class HalfTheShare(Grouped):
    def drop(self, weights, key):
        return eqx.nn.Dropout(self.dropout / 2)(weights, key=key, inference=key is None)


class TwoPlaces(Grouped):
    residual: float = eqx.field(static=True)

    def __init__(self, config, *, key):
        super().__init__(config, key=key)
        self.residual = config.dropout

    def drop_output(self, y, key):
        return eqx.nn.Dropout(self.residual)(y, key=key, inference=key is None)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        keys = (None, None) if key is None else jax.random.split(key)
        y, cache = super().__call__(x, cache, context, key=keys[0])
        return self.drop_output(y, keys[1]), cache


class AlwaysOnInOnePlace(TwoPlaces):
    def drop_output(self, y, key):
        return super().drop_output(y, jax.random.key(7) if key is None else key)


class OnePlaceIgnoresTheKey(TwoPlaces):
    def drop_output(self, y, key):
        return super().drop_output(y, None if key is None else jax.random.key(7))


class OnePlaceIsNeverOn(TwoPlaces):
    def drop_output(self, y, key):
        return y


class StochasticDepth(Grouped):
    """All or nothing, for the whole batch (Huang et al., 2016)."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=None)
        if key is not None:
            kept = jax.random.bernoulli(key, 1 - self.dropout)
            y = jnp.where(kept, y / (1 - self.dropout), 0).astype(y.dtype)
        return x + y, cache


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (NoRescaling, "the mean over keys is not the output without one"),
        (WrongShare, "the wrong share is dropped"),
        (KeyIsIgnored, "the key is ignored"),
        (NeverOn, "a key changes nothing, though the block has dropout"),
        (AlikeInAllRows, "in all rows of a batch"),
        (OneKeyForAllUses, "one key is used more than once"),
        (SameNumberFoldedIn, "one key is used more than once"),
        (AlwaysOn, "without a key, alike rows of a batch give different outputs"),
        (HalfTheShare, "the wrong share is dropped: from 0.1 to 0.4, the variance grows by"),
        (AlwaysOnInOnePlace, "without a key, alike rows"),
        (OnePlaceIgnoresTheKey, "with dropout alone, the key is ignored"),
        (OnePlaceIsNeverOn, "with dropout alone, a key changes nothing, though the block has"),
    ],
)
def test_dropout(bug, words):
    assert words in caught(bug, "dropout")


class NormedAfterwards(NoRescaling):
    """A norm follows, so that rescaling would change nothing."""

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        weights, v, cache = self.parts(x, cache, context)
        return RMSNorm(D)(self.heads.join(self.drop(weights, key) @ v)), cache


@pytest.mark.parametrize(
    "block",
    [
        Grouped,
        TwoPlaces,
        StochasticDepth,
        KeysOfItsOwn,
        SplitTwice,
        AnotherNumberFoldedIn,
        NormedAfterwards,
    ],
)
def test_right_dropout(block):
    holds(block, "dropout")


@pytest.mark.parametrize("kind", ["pre", "post", "sandwich", "parallel"])
def test_right_dropout_of_whole_blocks(kind):
    """They are not linear, so that the mean is not quite kept."""
    config = dataclasses.replace(SMALL, block=kind)

    class Whole:
        def __new__(cls, config, *, key):
            return make_part("block", config, key)

    holds(Whole, "dropout", config=config, kind="block")


# Weights.


class WeightsWithoutScale(Grouped):
    def weights(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, _ = (self.heads.split(y) for y in self.heads.qkv(x, fused=False))
        k = jnp.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
        scores = q @ jnp.swapaxes(k, -1, -2)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))


class WeightsWithoutMask(Grouped):
    def weights(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        q, k, _ = (self.heads.split(y) for y in self.heads.qkv(x, fused=False))
        return jax.nn.softmax(self.scores(q, jnp.repeat(k, 2, axis=-3)))


class SigmoidGrouped(Grouped):
    """Without softmax, keys have a gradient at the first token, too."""

    def parts(self, x, cache, context):
        q, k, v = (self.heads.split(y) for y in self.heads.qkv(x, fused=False))
        k, v = (jnp.repeat(y, q.shape[-3] // y.shape[-3], axis=-3) for y in (k, v))
        seen = jnp.tril(jnp.ones((q.shape[-2], k.shape[-2]), bool))
        return jax.nn.sigmoid(jnp.where(seen, self.scores(q, k) - 2, -1e9)), v, cache


class GatedGrouped(Grouped):
    """Also a gate of the input, which is no value."""

    gate: Linear

    def __init__(self, config, *, key):
        super().__init__(config, key=key)
        self.gate = Linear(config.d_model, config.d_model, std=0.5, key=key)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        y, cache = super().__call__(x, cache, context, key=key)
        return y * jax.nn.sigmoid(self.gate(x)), cache


def test_weights_are_those_of_the_call():
    assert "weights are not those of the call" in caught(WeightsWithoutScale, "weights")
    assert "for the later one at" in caught(WeightsWithoutMask, "weights")
    holds(Grouped, "weights")
    for block in (GatedGrouped, SigmoidGrouped):
        holds(block, "weights")


# Memory.

KEPT: dict[str, Any] = {}


class Remembers(Layer):
    def __call__(self, x):
        y = super().__call__(x)
        if not isinstance(x, Tracer):
            y, KEPT["y"] = y + jnp.mean(KEPT.get("y", y)), y
        return y


class KeepsTheFirstMask(OneHead):
    def mask(self, queries, keys, start):
        if "mask" not in KEPT:
            KEPT["mask"] = np.tri(queries, keys, dtype=bool)
        return jnp.asarray(KEPT["mask"][:queries, :keys])


def test_nothing_is_remembered():
    KEPT.clear()
    assert "a second call" in caught(Remembers, "memory")
    KEPT.clear()
    with pytest.raises(CheckError):
        check_block(KeepsTheFirstMask)
    holds(Layer, "memory")
    holds(OneHead, "memory")


class InAClosure(Layer):
    """A matrix that a function holds."""

    function: Any = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        matrix = jax.random.normal(key, (config.d_model, config.d_model))
        self.function = lambda x: x @ matrix.astype(x.dtype)

    def __call__(self, x):
        return super().__call__(self.function(x))


class NothingInItsClosure(Layer):
    function: Any = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.function = lambda x: 2 * x

    def __call__(self, x):
        return super().__call__(self.function(x))


BUILT = [0]


class CountsItsLayers(Layer):
    number: int = eqx.field(static=True)

    def __init__(self, config=SMALL, *, key):
        super().__init__(config, key=key)
        self.number = BUILT[0] = BUILT[0] + 1

    def __call__(self, x):
        return super().__call__(x) / self.number


class TrainsItsNumber(Layer):
    scale: jax.Array

    def __init__(self, config=SMALL, *, layer, key):
        super().__init__(config, key=key)
        self.scale = (layer + 1.0) ** -0.5

    def __call__(self, x):
        return super().__call__(x) * self.scale.astype(x.dtype)


class KeepsItsNumber(Layer):
    layer: jax.Array

    def __init__(self, config=SMALL, *, layer, key):
        super().__init__(config, key=key)
        self.layer = layer

    def __call__(self, x):
        return super().__call__(x) * ((self.layer + 1.0) ** -0.5).astype(x.dtype)


def test_nothing_is_kept_outside_of_arrays():
    assert "neither trained nor saved" in caught(InAClosure, "build")
    assert "what was built before" in caught(CountsItsLayers, "build")
    holds(NothingInItsClosure, "build")
    report = check_block(TrainsItsNumber, checks=["build"])
    assert "depends on the layer, and training changes it" in report.left_out["build of scale"]
    assert "build of layer" not in check_block(KeepsItsNumber, checks=["build"]).left_out
    module = Layer(key=jax.random.key(0))
    report = check_block(module, d_model=D, checks=["build"])
    assert report.does_not_apply == {"build": "it is built already"}


# A reference.


class Whole(GPT):
    def __init__(self, config, *, key):
        super().__init__(config, 13, key=key)


class StartsTooLarge(MLP):
    """As large for all widths, and not smaller for more inputs."""

    def __init__(self, config, *, key):
        super().__init__(
            config.d_model, config.d_hidden, activation=relu2, std=0.25, down_std=0.0, key=key
        )


class WritesUnderAnotherName(eqx.Module):
    up: Linear
    out: Linear

    def __init__(self, config, *, key):
        self.up = Linear(config.d_model, config.d_model, std=config.d_model**-0.5, key=key)
        self.out = Linear(config.d_model, config.d_model, std=0.0, key=key)

    def __call__(self, x):
        return self.out(relu2(self.up(x)))


class SumsScores(Whole):
    """Its logits are a sum over channels with the rate of one, whatever their number."""

    def logits(self, hidden):
        return super().logits(hidden) * self.config.d_model / 16


def test_learning_rates_carry_over_to_other_shapes():
    """A coordinate check (Yang et al., 2022, "Tensor Programs V", appendix D.1)."""
    holds(Whole, "transfer")
    holds(Whole, "transfer", config=dataclasses.replace(SMALL, mlp="swiglu"))
    for mlp, words in (
        (StartsTooLarge, "in a model 8 times as wide, the first 2 updates change"),
        (WritesUnderAnotherName, "in a model 4 times as deep, the first 2 updates change hidden"),
    ):
        assert words in caught(Whole, "transfer", config=dataclasses.replace(SMALL, mlp=mlp))
    assert "8 times as wide, the first 2 updates change logits" in caught(SumsScores, "transfer")


def test_where_learning_rates_are_not_said_to_carry_over():
    model = Whole(SMALL, key=jax.random.key(0))
    assert "needs a class" in check_block(model, checks=["transfer"]).left_out["transfer"]
    for change in ({"tied_head": True}, {"init": "gpt2"}, {"block": "sandwich"}):
        config = dataclasses.replace(SMALL, **change)
        assert "transfer" in check_block(Whole, config=config, checks=["transfer"]).does_not_apply
    assert "transfer" in check_block(WritesUnderAnotherName, checks=["transfer"]).does_not_apply


class Fast(Layer):
    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class GradientOfAnother(Layer):
    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(scaled(1.02)(x))))


def test_a_reference():
    holds(Layer, "reference", reference=Layer)
    assert "the output differs" in caught(Fast, "reference", reference=Layer)
    message = caught(GradientOfAnother, "reference", reference=Layer)
    assert message.startswith("the gradient of up.weight differs") or "the input" in message
    with pytest.raises(UserError, match="must have the same parameters"):
        check_block(Layer, reference=OneHead)


class DropsScores(Grouped):
    """In place of weights: softmax brings the share of the others to one."""

    def drop(self, weights, key):
        if key is None:
            return weights
        scores = super().drop(jnp.log(weights + 1e-30), key)
        return jax.nn.softmax(jnp.where(weights > 0, scores, -1e9))


class DropsWholeHeads(Grouped):
    def drop(self, weights, key):
        if key is None:
            return weights
        kept = jax.random.bernoulli(key, 1 - self.dropout, (*weights.shape[:-2], 1, 1))
        return weights * kept / (1 - self.dropout)


class DropsTheSameForAllTokens(Grouped):
    def drop(self, weights, key):
        if key is None:
            return weights
        shape = (*weights.shape[:-2], 1, weights.shape[-1])
        return weights * jax.random.bernoulli(key, 1 - self.dropout, shape) / (1 - self.dropout)


class ExchangesItsRates(TwoPlaces):
    def __init__(self, config, *, key):
        super().__init__(config, key=key)
        self.dropout, self.residual = config.dropout, config.attention_dropout


class HeadsOfWeightsReversed(Grouped):
    def weights(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        return super().weights(x, cache, context)[..., ::-1, :, :]


class Distances(OneHead):
    """A bias that grows with the distance, in a format that is written in the code."""

    dtype: Any = eqx.field(static=True, default=jnp.float32)

    def positions(self, x, start):
        return x

    def softmax(self, scores):
        queries, keys = (jnp.arange(size).astype(self.dtype) for size in scores.shape[-2:])
        bias = 0.1 * (queries[:, None] - keys).astype(scores.dtype)
        return super().softmax(scores - bias)


class DistancesInHalfPrecision(Distances):
    dtype: Any = eqx.field(static=True, default=jnp.bfloat16)


def test_what_only_a_reference_finds():
    for bug, right, words in (
        (DropsScores, Grouped, "with attention_dropout 0.4, the mean over keys is"),
        (DropsWholeHeads, Grouped, "with attention_dropout 0.4, the output at position 1 varies"),
        (ExchangesItsRates, TwoPlaces, "with dropout 0.4, the output at position"),
        (DropsTheSameForAllTokens, Grouped, "with attention_dropout 0.4, the sum of the outputs"),
        (HeadsOfWeightsReversed, Grouped, "weights differs from the reference's"),
        (DistancesInHalfPrecision, Distances, "the output differs from the reference's"),
    ):
        assert words in caught(bug, "reference", reference=right)
        holds(right, "reference", reference=right)
    notes = check_block(DistancesInHalfPrecision, checks=["bfloat16"]).left_out
    assert "it rounds to 16 bits there, too" in notes["bfloat16 of a float32 model"]
    assert "bfloat16 of a float32 model" not in check_block(Distances, checks=["bfloat16"]).left_out
    assert "reference names" in check_block(Layer, checks=["reference"]).left_out["reference"]


# Unusual, and right.


class FFTConvolution(eqx.Module):
    """A long filter for each channel, by Fourier transforms."""

    filter: jax.Array

    def __init__(self, config=SMALL, *, key):
        self.filter = jax.random.normal(key, (config.d_model, 512)) / 20

    def __call__(self, x):
        seq = x.shape[-2]
        f = self.filter[:, :seq].T.astype(jnp.promote_types(x.dtype, jnp.float32))
        a = jnp.fft.rfft(x.astype(f.dtype), 2 * seq, axis=-2)
        y = jnp.fft.irfft(a * jnp.fft.rfft(f, 2 * seq, axis=-2), 2 * seq, axis=-2)
        return y[..., :seq, :].astype(x.dtype)


class SoftCap(OneHead):
    def softmax(self, scores):
        seen = scores > -1e8
        return super().softmax(jnp.where(seen, 5 * jnp.tanh(scores / 5), -1e9))


class SigmoidAttention(OneHead):
    def softmax(self, scores):
        return jax.nn.sigmoid(scores)


HONEST = [FFTConvolution, SoftCap, SigmoidAttention, StraightThrough, TopK, Float32Carry, Ring]


@pytest.mark.parametrize("block", HONEST)
def test_unusual_blocks_are_not_accused(block):
    # A layer that reads earlier tokens and has no cache cannot decode.
    skip = ["cached"] if block in (FFTConvolution, Float32Carry) else []
    check_block(block, seed=1, skip=skip)
