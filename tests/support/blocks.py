"""Blocks without a mistake, in steps that one can be planted in."""

import equinox as eqx
import jax
import jax.numpy as jnp

from gptlite.nn import WHOLE_SEQUENCE, Linear, Rotary
from gptlite.nn.cache import write_at
from gptlite.research.small import SMALL

D = 16


class OneHead(eqx.Module):
    """Attention with one head, in steps that a bug can be planted in."""

    query: Linear
    key: Linear
    value: Linear

    def __init__(self, config=SMALL, *, key):
        d_model = config.d_model
        self.query, self.key, self.value = (
            Linear(d_model, d_model, std=0.5, key=k) for k in jax.random.split(key, 3)
        )

    def init_cache(self, batch, capacity, dtype):
        return (jnp.zeros((*batch, capacity, D), dtype),) * 2

    def positions(self, x, start):
        return Rotary()(x[..., None, :, :], start)[..., 0, :, :]

    def write(self, cache, new, start):
        pairs = zip(cache, new, strict=True)
        return tuple(write_at(old, part, jnp.asarray(start), axis=-2) for old, part in pairs)

    def mask(self, queries, keys, start):
        places = jnp.asarray(start)[..., None] + jnp.arange(queries)
        return jnp.arange(keys) <= places[..., None]

    def softmax(self, scores):
        return jax.nn.softmax(scores, axis=-1)

    def mix(self, weights, values):
        return (weights @ values.astype(weights.dtype)).astype(values.dtype)

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        start = context.start
        q, k = (self.positions(layer(x), start) for layer in (self.query, self.key))
        v = self.value(x)
        if cache is not None:
            cache = k, v = self.write(cache, (k, v), start)
        scores = (q @ jnp.swapaxes(k, -1, -2)).astype(jnp.promote_types(q.dtype, jnp.float32)) / 4
        seen = self.mask(q.shape[-2], k.shape[-2], start)
        return self.mix(self.softmax(jnp.where(seen, scores, -1e9)), v), cache


class Layer(eqx.Module):
    """An MLP, right as it stands."""

    up: Linear
    down: Linear

    def __init__(self, config=SMALL, *, key):
        up_key, down_key = jax.random.split(key)
        self.up = Linear(config.d_model, 24, std=0.5, key=up_key)
        self.down = Linear(24, config.d_model, std=0.0, key=down_key)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class RunningMean(eqx.Module):
    """A recurrent state: the sum of all values, and how many they are."""

    value: Linear

    def __init__(self, config=SMALL, *, key):
        self.value = Linear(config.d_model, config.d_model, std=0.5, key=key)

    def init_cache(self, batch, capacity, dtype):
        return jnp.zeros((*batch, D)), jnp.zeros((*batch, 1))

    def real(self, x, context):
        lengths = x.shape[-2] if context.lengths is None else context.lengths[..., None]
        return jnp.broadcast_to(jnp.arange(x.shape[-2]) < lengths, x.shape[:-1])[..., None]

    def __call__(self, x, cache=None, context=WHOLE_SEQUENCE, *, key=None):
        real = self.real(x, context)
        v = jnp.where(real, self.value(x).astype(jnp.float32), 0)
        total, count = jnp.cumsum(v, axis=-2), jnp.cumsum(real.astype(jnp.float32), axis=-2)
        if cache is not None:
            total, count = cache[0][..., None, :] + total, cache[1][..., None, :] + count
            cache = total[..., -1, :], count[..., -1, :]
        return (total / jnp.maximum(count, 1)).astype(x.dtype), cache


def sizes_for_tests():
    """A number in the code of another module."""
    return 101
