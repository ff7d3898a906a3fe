"""The position-wise feed-forward layer: widen, bend, narrow."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from gptlite.nn.linear import Linear
from gptlite.nn.precision import widen


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
    """`down(activation(up(x)))`.

    Measured: against ReLU², GELU no difference found (-0.001 ± 0.007), SiLU 0.014 ± 0.006 nats
    worse, ReLU no difference found (+0.011 ± 0.006) (benchmarks/blocks.md).
    """

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


class GatedMLP(eqx.Module):
    """`down(activation(gate(x)) · up(x))` (Shazeer, 2020): SwiGLU with SiLU (eq. 6), GEGLU with
    GELU (eq. 6).

    Measured: against a ReLU² MLP with as many parameters, SwiGLU 0.015 ± 0.006 nats better, GEGLU
    no difference found (-0.010 ± 0.008) (benchmarks/blocks.md).
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
        activation: Callable[[Array], Array] = jax.nn.silu,
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


class MoE(eqx.Module):
    """A mixture of experts: MLPs, of which a router picks a few for each token, and weights each
    with its probability (Shazeer et al., 2017, section 2; Fedus et al., 2022, section 2.1).

    Trained with a second loss, which keeps the experts equally busy. For a sequence it is
    `balance_loss · n_experts · sum_i f_i P_i`, where f is the share of the choices and P the mean
    probability that went to expert i (Fedus et al., 2022, eq. 4), over the sequence's tokens
    (DeepSeek-AI, 2024, "DeepSeek-V3", section 2.1.2); the mean over sequences is taken. So it does
    not depend on how a batch is divided. It is not in the output: it joins the gradients on their
    way back, as if it had been added to the mean loss, once for each call (so a batch should come
    in one, and not under `vmap`). `inference` (`eqx.nn.inference_mode`) leaves it out.

    No token is ever dropped, and none knows of others'. Every expert computes every token, those
    not picked times 0: they are groups of columns of one wide MLP. That costs the arithmetic of all
    experts, and is right where they are few.

    Measured: 4 experts, 2 a token, each half as wide as the MLP, 0.019 ± 0.006 nats worse than it
    (benchmarks/blocks.md).
    """

    router: Linear
    up: Linear
    down: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)
    n_experts: int = eqx.field(static=True)
    experts_per_token: int = eqx.field(static=True)
    balance_loss: float = eqx.field(static=True)
    inference: bool

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        *,
        n_experts: int,
        experts_per_token: int,
        balance_loss: float = 0.01,
        activation: Callable[[Array], Array] = relu2,
        std: float,
        down_std: float,
        key: PRNGKeyArray,
    ):
        """`d_expert`: width inside each expert. `std` and `down_std`: see `Linear`, for `router`
        and `up`, and for `down`."""
        router_key, up_key, down_key = jax.random.split(key, 3)
        self.router = Linear(d_model, n_experts, std=std, key=router_key)
        self.up = Linear(d_model, n_experts * d_expert, std=std, key=up_key)
        self.down = Linear(n_experts * d_expert, d_model, std=down_std, key=down_key)
        self.activation = activation
        self.n_experts = n_experts
        self.experts_per_token = experts_per_token
        self.balance_loss = balance_loss
        self.inference = False

    def __call__(
        self,
        x: Float[Array, "*batch seq d_model"],
        *,
        padding_mask: Bool[Array, "*batch seq"] | None = None,
    ) -> Float[Array, "*batch seq d_model"]:
        """`padding_mask`: False where there is no token; such places do not count in the second
        loss."""
        probability = jax.nn.softmax(widen(self.router(x)), axis=-1)
        _, picked = lax.top_k(probability, self.experts_per_token)
        picked = jnp.sum(jax.nn.one_hot(picked, self.n_experts, dtype=probability.dtype), axis=-2)
        hidden = self.activation(self.up(x)).reshape(*probability.shape, -1)
        gate = (probability * picked).astype(x.dtype)
        y = self.down((hidden * gate[..., None]).reshape(*x.shape[:-1], -1))
        if self.inference or not self.balance_loss:
            return y
        real = jnp.ones(x.shape[:-1]) if padding_mask is None else padding_mask
        real = real.astype(probability.dtype)[..., None]
        tokens = jnp.maximum(jnp.sum(real, axis=-2), 1)
        share = jnp.sum(picked * real, axis=-2) / tokens / self.experts_per_token
        mean = jnp.sum(probability * real, axis=-2) / tokens
        balance = self.n_experts * jnp.mean(jnp.sum(share * mean, axis=-1))
        return _add_loss(y, self.balance_loss * balance)


@jax.custom_vjp
def _add_loss(y: Array, loss: Float[Array, ""]) -> Array:
    """`y`; but gradients are those of the final loss plus `loss`."""
    del loss
    return y


_add_loss.defvjp(
    lambda y, loss: (y, jnp.ones_like(loss)),
    lambda one, grad: (grad, one),
)
