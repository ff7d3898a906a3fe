"""The position-wise feed-forward layer: widen, bend, narrow."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.linear import Linear


def relu2(x: Float[Array, "*batch d_ff"]) -> Float[Array, "*batch d_ff"]:
    """`max(x, 0)²` (So et al., 2021, section 4.2)."""
    return jnp.square(jax.nn.relu(x))


# GELU is the tanh approximation, as in GPT-2 (Hendrycks and Gimpel, 2016, section 2).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": relu2,
}


class MLP(eqx.Module):
    """`down(activation(up(x)))`."""

    up: Linear
    down: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        std: float,
        down_std: float,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        """`std` and `down_std`: see `Linear`, for `up` and `down`."""
        up_key, down_key = jax.random.split(key)
        self.up = Linear(d_model, d_ff, std=std, bias=bias, key=up_key)
        self.down = Linear(d_ff, d_model, std=down_std, bias=bias, key=down_key)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        return self.down(self.activation(self.up(x)))


class SwiGLU(eqx.Module):
    """`down(silu(gate(x)) · up(x))` (Shazeer, 2020, eq. 6)."""

    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        std: float,
        down_std: float,
        bias: bool = False,
        key: PRNGKeyArray,
    ):
        """`std` and `down_std`: see `Linear`, for `gate` and `up`, and for `down`."""
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = Linear(d_model, d_ff, std=std, bias=bias, key=gate_key)
        self.up = Linear(d_model, d_ff, std=std, bias=bias, key=up_key)
        self.down = Linear(d_ff, d_model, std=down_std, bias=bias, key=down_key)

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
