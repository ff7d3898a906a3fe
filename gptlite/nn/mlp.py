"""The position-wise feed-forward layer."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.nn.kernels.activations import from_input
from gptlite.nn.linear import Linear


def relu2(x: Float[Array, "*batch d_ff"]) -> Float[Array, "*batch d_ff"]:
    """`max(x, 0)²` (So et al., 2021, section 4.2)."""
    return jnp.square(jax.nn.relu(x))


def relu(x: Float[Array, "*batch d_ff"]) -> Float[Array, "*batch d_ff"]:
    """`max(x, 0)`."""
    return jax.nn.relu(x)


def identity(x: Float[Array, "*batch d_ff"]) -> Float[Array, "*batch d_ff"]:
    """`x`."""
    return x


# The tanh approximation, as in GPT-2 (Hendrycks and Gimpel, 2016, section 2).
gelu = from_input(jax.nn.gelu, f"{__name__}.gelu")
silu = from_input(jax.nn.silu, f"{__name__}.silu")
tanh = from_input(jnp.tanh, f"{__name__}.tanh")
sigmoid = from_input(jax.nn.sigmoid, f"{__name__}.sigmoid")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "silu": silu,
    "relu": relu,
    "relu2": relu2,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "identity": identity,
}


class MLP(eqx.Module):
    """`down(activation(up(x)))`.

    Loss against ReLU², nats per token: GELU +0.001 ± 0.011, SiLU +0.019 ± 0.010, ReLU
    +0.008 ± 0.009 (benchmarks/blocks.md).
    """

    up: Linear
    down: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Callable[[Array], Array] = gelu,
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


class GatedMLP(eqx.Module):
    """`down(activation(gate(x)) · up(x))` (Shazeer, 2020, eq. 6): SwiGLU (SiLU), GEGLU (GELU).

    Loss against a ReLU² MLP with as many parameters, nats per token: SwiGLU -0.013 ±
    0.007, GEGLU -0.012 ± 0.011 (benchmarks/blocks.md).
    """

    gate: Linear
    up: Linear
    down: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Callable[[Array], Array] = silu,
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
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        return self.down(self.activation(self.gate(x)) * self.up(x))
