"""The same arithmetic costs the same, however it is written."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from gptlite.inspect.flops import flops_per_token, operations_per_token


class Of(eqx.Module):
    """A function of ids of which a model is made."""

    weight: jax.Array
    function: Callable = eqx.field(static=True)
    config: object = eqx.field(static=True)

    def __call__(self, ids):
        return self.function(self.weight, jax.nn.one_hot(ids, 8))


class Config:
    context_length = 64


def model(function, *shape):
    return Of(jnp.ones(shape), function, Config())


def test_a_layer_costs_as_much_in_convolutions_of_width_1_as_in_products():
    def product(w, x):
        return jnp.tanh(x @ w)

    def convolution(w, x):
        return jnp.tanh(
            jax.lax.conv_general_dilated(
                x[None], w[None], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            )[0]
        )

    first, second = model(product, 8, 5), model(convolution, 8, 5)
    assert flops_per_token(first)[0] == flops_per_token(second)[0] == 2 * 8 * 5
    assert flops_per_token(first) == flops_per_token(second)
    assert operations_per_token(first) == operations_per_token(second)


def test_the_kernel_and_the_groups_of_a_convolution_count():
    def convolution(w, x):  # each channel alone, three wide
        return jax.lax.conv_general_dilated(
            x[None],
            w,
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=8,
        )[0]

    assert flops_per_token(model(convolution, 3, 1, 8))[0] == 2 * 3 * 8


def test_rows_that_take_different_matrices_cost_as_much_as_with_one():
    def experts(w, x):
        return jax.lax.ragged_dot(x, w, jnp.array([14, 30, 20]))

    def one(w, x):
        return x @ w[0]

    first, second = model(one, 3, 8, 5), model(experts, 3, 8, 5)
    assert flops_per_token(second) == flops_per_token(first)
    # Neither is a product with the transposed, nor the sum over the rows of each.
    assert flops_per_token(second)[1] == flops_per_token(first)[1] > 2 * 8 * 5


def test_a_triangular_system_is_not_free():
    def solved(w, x):
        return jax.lax.linalg.triangular_solve(w, x[:8], left_side=True, lower=True)

    # 8 x 8 for each of 8 columns, for 64 tokens.
    assert flops_per_token(model(solved, 8, 8))[0] == 8 * 8 * 8 // 64


def test_a_fourier_transform_is_not_free():
    def mixed(w, x):
        return jnp.fft.fft(x + w, axis=0).real

    # Of 64 numbers, for each of 8 channels.
    assert flops_per_token(model(mixed, 8))[0] == 5 * 8 * math.log2(64)


def test_a_recurrence_costs_as_much_as_a_scan_as_unrolled():
    def scanned(w, x):
        def step(state, x):
            state = w * state + x
            return state, state

        return jax.lax.scan(step, jnp.zeros(8), x)[1]

    def unrolled(w, x):
        state, states = jnp.zeros(8), []
        for i in range(64):
            state = w * state + x[i]
            states.append(state)
        return jnp.stack(states)

    first, second = (operations_per_token(model(f, 8)) for f in (scanned, unrolled))
    # Forward two for each number, backward at least three more.
    assert first >= 5 * 8
    assert first == pytest.approx(second, rel=0.1)
    assert flops_per_token(model(scanned, 8)) == (0, 0)


def test_all_arithmetic_counts_once():
    def summed(w, x):
        return jnp.cumsum(jnp.exp(x * w), axis=0)

    # Forward 3 for each number; backward the sum once more, and a product for each factor (exp's,
    # w's), and w's sum over tokens; and of the loss: the square, its sum and its slope.
    found = operations_per_token(model(summed, 8))
    assert 8 * 8 <= found <= 8 * 12
