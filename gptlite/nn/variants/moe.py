"""A mixture of experts in place of an MLP."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.machine.fields import Between, Options
from gptlite.nn.context import PerSequence
from gptlite.nn.dtypes import widen
from gptlite.nn.linear import Linear
from gptlite.nn.mlp import relu2


@dataclass(frozen=True, kw_only=True)
class MoEOptions(Options):
    """The options of `MoE`.

    **Raises:** `UserError` if there are fewer experts than a token has.
    """

    n_experts: Annotated[int, Between(1, 10_000)] = 4
    experts_per_token: Annotated[int, Between(1, 10_000)] = 2
    balance_loss: Annotated[float, Between(0.0)] = 0.01

    def __post_init__(self):
        super().__post_init__()
        within = Between(1, self.n_experts)
        within.check("experts_per_token in model.mlp moe", self.experts_per_token)


class MoE(eqx.Module):
    """A mixture of experts: MLPs, of which a router picks a few for each token, and weights each
    with its probability (Shazeer et al., 2017, section 2; Fedus et al., 2022, section 2.1).

    `aux_loss` keeps the experts equally busy: it is to be added to the training loss.

    No token is dropped, and no token's output depends on other tokens. The experts are groups of
    columns of one wide MLP. Every expert computes every token, and the outputs of experts that were
    not picked are multiplied by 0. So a token costs as much as all experts together.

    Loss of 4 experts, 2 per token, each half as wide as the MLP, against the MLP: +0.021
    ± 0.011 nats per token (benchmarks/blocks.md).
    """

    router: Linear
    up: Linear
    down: Linear
    activation: Callable[[Array], Array] = eqx.field(static=True)
    n_experts: int = eqx.field(static=True)
    experts_per_token: int = eqx.field(static=True)
    balance_loss: float = eqx.field(static=True)

    def __init__(
        self,
        d_model: int,
        d_expert: int,
        *,
        n_experts: int,
        experts_per_token: int,
        balance_loss: float = MoEOptions.balance_loss,
        activation: Callable[[Array], Array] = relu2,
        std: float,
        down_std: float,
        key: PRNGKeyArray,
    ):
        """`d_expert` is the width inside each expert, `balance_loss` the weight of `aux_loss`.
        `std` is that of `router` and `up`, `down_std` that of `down` (see `Linear`).

        **Raises:** `UserError` if there are fewer experts than a token has.
        """
        Between(1, n_experts).check("experts_per_token", experts_per_token)
        router_key, up_key, down_key = jax.random.split(key, 3)
        self.router = Linear(d_model, n_experts, std=std, key=router_key)
        self.up = Linear(d_model, n_experts * d_expert, std=std, key=up_key)
        self.down = Linear(n_experts * d_expert, d_model, std=down_std, key=down_key)
        self.activation = activation
        self.n_experts = n_experts
        self.experts_per_token = experts_per_token
        self.balance_loss = balance_loss

    @classmethod
    def from_config(cls, config: Any, options: MoEOptions, *, key: PRNGKeyArray) -> "MoE":
        """The experts that a token has are together as wide as `config.d_hidden`."""
        std, down_std = config.init_stds
        return cls(
            config.d_model,
            max(1, config.d_hidden // options.experts_per_token),
            **vars(options),
            std=std,
            down_std=down_std,
            key=key,
        )

    def __call__(self, x: Float[Array, "*batch seq d_model"]) -> Float[Array, "*batch seq d_model"]:
        probability, picked = self._route(x)
        hidden = self.activation(self.up(x)).reshape(*probability.shape, -1)
        gate = (probability * picked).astype(x.dtype)
        return self.down((hidden * gate[..., None]).reshape(*x.shape[:-1], -1))

    def aux_loss(
        self, x: Float[Array, "*batch seq d_model"], lengths: PerSequence | None = None
    ) -> Float[Array, ""]:
        """The mean over sequences of `balance_loss · n_experts · sum_i f_i P_i`.

        f_i is expert i's share of the choices, and P_i its mean probability (Fedus et al., 2022,
        eq. 4), over the tokens of a sequence (DeepSeek-AI, 2024, "DeepSeek-V3", section 2.1.2), of
        which the first `lengths` are real. So the loss does not depend on how a batch is divided.
        """
        probability, picked = self._route(x)
        seq = x.shape[-2]
        lengths = jnp.asarray(seq) if lengths is None else lengths
        real = (jnp.arange(seq) < lengths[..., None])[..., None]
        tokens = jnp.maximum(lengths, 1)[..., None]
        share = jnp.sum(picked * real, axis=-2) / tokens / self.experts_per_token
        mean = jnp.sum(probability * real, axis=-2) / tokens
        balance = self.n_experts * jnp.sum(share * mean, axis=-1)
        return self.balance_loss * jnp.mean(balance)

    def _route(
        self, x: Float[Array, "*batch d_model"]
    ) -> tuple[Float[Array, "*batch experts"], Float[Array, "*batch experts"]]:
        """Each expert's probability, and 1 for those that are picked."""
        probability = jax.nn.softmax(widen(self.router(x)), axis=-1)
        _, picked = lax.top_k(probability, self.experts_per_token)
        one_hot = jax.nn.one_hot(picked, self.n_experts, dtype=probability.dtype)
        return probability, jnp.sum(one_hot, axis=-2)
