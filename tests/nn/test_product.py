"""The product with its own backward pass against the plain one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptlite.nn.kernels.product import product

# Rows, d_in and d_out; with heads in front; both ways of which factor is the narrower.
SHAPES = [
    ((24, 8), (16, 8)),
    ((24, 16), (8, 16)),
    ((3, 12, 8), (3, 20, 8)),
    ((3, 12, 8), (3, 4, 8)),
]


def plain(a, b):
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)


def drawn(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(multiply, a, b):
    def loss(a, b):
        return jnp.sum(jnp.sin(multiply(a, b)))

    return multiply(a, b), *jax.grad(loss, argnums=(0, 1))(a, b)


@pytest.mark.parametrize("shapes", SHAPES)
def test_value_and_gradients_are_the_plain_products(shapes):
    a, b = (drawn(shape, jnp.float32, i) for i, shape in enumerate(shapes))
    ours, theirs = value_and_gradients(product, a, b), value_and_gradients(plain, a, b)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shapes", SHAPES)
def test_in_bfloat16_only_the_factors_are_rounded(shapes):
    """Sums are float32's; gradients come back in the factors' format."""
    a, b = (drawn(shape, jnp.bfloat16, i) for i, shape in enumerate(shapes))
    value, grad_a, grad_b = value_and_gradients(product, a, b)
    assert value.dtype == jnp.float32
    assert grad_a.dtype == grad_b.dtype == jnp.bfloat16
    wide = (a.astype(jnp.float32), b.astype(jnp.float32))
    exact = value_and_gradients(plain, *wide)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5, atol=1e-5)
    for x, y in zip((grad_a, grad_b), exact[1:], strict=True):
        # The incoming gradient and the result are each rounded to 8 bits.
        error = np.linalg.norm(np.float32(x) - y) / np.linalg.norm(y)
        assert error < 2 * 2.0**-8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_under_vmap_it_is_the_product_of_each(dtype):
    a, b = drawn((5, 6, 8), dtype, 0), drawn((5, 7, 8), dtype, 1)
    each = jax.jit(jax.vmap(functools.partial(value_and_gradients, product)))(a, b)
    for i in range(5):
        for x, y in zip(each, value_and_gradients(product, a[i], b[i]), strict=True):
            one, alone = np.float32(np.asarray(x)[i]), np.float32(y)
            np.testing.assert_allclose(one, alone, rtol=1e-2, atol=1e-2)


def test_it_can_be_differentiated_twice():
    a, b = drawn((4, 3), jnp.float32, 0), drawn((5, 3), jnp.float32, 1)

    def along(multiply):
        slope = jax.grad(lambda b: jnp.sum(jnp.sin(multiply(a, b))))
        return jax.jvp(slope, (b,), (jnp.ones_like(b),))[1]

    found, wanted = jax.jit(lambda: (along(product), along(plain)))()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_its_result_can_be_asked_for_in_the_format_of_the_factors():
    a, b = drawn((24, 8), jnp.bfloat16, 0), drawn((16, 8), jnp.bfloat16, 1)
    rounded = jax.jit(lambda a, b: product(a, b, jnp.bfloat16))(a, b)
    np.testing.assert_array_equal(rounded, jax.jit(product)(a, b).astype(jnp.bfloat16))
    gradients = jax.grad(lambda a, b: jnp.sum(product(a, b, jnp.bfloat16) ** 2), argnums=(0, 1))
    wide = jax.grad(lambda a, b: jnp.sum(product(a, b) ** 2), argnums=(0, 1))
    found, wanted = jax.jit(gradients)(a, b), jax.jit(wide)(a, b)
    for x, y in zip(map(np.float32, found), map(np.float32, wanted), strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < 2 * 2.0**-8  # two more roundings to 8 bits
