"""Muon's update: momentum, orthogonalised (Jordan et al., 2024, "Muon: an optimizer for hidden
layers in neural networks")."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from gptlite.nn.kernels.product import product
from gptlite.nn.kernels.rows import map_over_devices

# a, b, c of x -> a x + (b x xᵀ + c (x xᵀ)²) x. Not the coefficients of a series: chosen for a
# steep slope at 0, they bring singular values to between 0.7 and 1.2 in five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """The matrices of `x`, `m <= n`, with their singular values brought near 1, by five Newton-
    Schulz steps in bfloat16, which is also the result's format."""
    a, b, c = COEFFICIENTS
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    y = (x / (norm + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        square = product(y, y).astype(y.dtype)
        # `product` transposes its second factor, and `square` is symmetric.
        inner = (b * square + c * product(square, square)).astype(y.dtype)
        y = (a * y + product(inner, jnp.swapaxes(y, -1, -2))).astype(y.dtype)
    return y


def scale_by_orthogonalization() -> optax.GradientTransformation:
    """Orthogonalises updates `[n_layers, d_out, d_in]` and multiplies each by
    `sqrt(max(d_out, d_in) / min(d_out, d_in))`, so that a wide matrix learns as fast as a square.

    Matrices of one shape, transposed or not, are batched. Each device does its share of a batch.
    """

    def update(updates, params):
        del params
        leaves, structure = jax.tree.flatten(updates)
        by_shape = collections.defaultdict(list)
        for place, leaf in enumerate(leaves):
            by_shape[tuple(sorted(leaf.shape[1:]))].append(place)
        for (m, n), places in by_shape.items():
            batch = jnp.concatenate([_wide(leaves[place]) for place in places])
            done = map_over_devices(orthogonalize, batch).astype(batch.dtype) * math.sqrt(n / m)
            ends = list(itertools.accumulate(len(leaves[place]) for place in places))
            for place, part in zip(places, jnp.split(done, ends[:-1]), strict=True):
                tall = leaves[place].shape[1] > leaves[place].shape[2]
                leaves[place] = jnp.swapaxes(part, 1, 2) if tall else part
        return jax.tree.unflatten(structure, leaves)

    return optax.stateless(update)


def _wide(x: Float[Array, "layers d_out d_in"]) -> Float[Array, "layers m n"]:
    return jnp.swapaxes(x, 1, 2) if x.shape[1] > x.shape[2] else x
