"""MLPs for a comparison whose answer is known: many without an effect, and one that is better.

    gptlite compare --name planted --training.steps 300 --training.eval-every 100 \
        --vary model.mlp=benchmarks/planted.py:Planted:n=1,benchmarks/planted.py:Planted:sine=true
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from gptlite.config import ModelConfig
from gptlite.nn import MLP
from gptlite.nn.mlp import relu2


class Planted(eqx.Module):
    """The MLP of the preset `quick`, from other first parameters for each `n`, which has no effect;
    or with `sine` that of the README, which learns a little faster."""

    mlp: MLP

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray, n: int = 0, sine: bool = False):
        std, down_std = config.init_stds
        self.mlp = MLP(
            config.d_model,
            config.d_hidden,
            activation=jnp.sin if sine else relu2,
            std=std,
            down_std=down_std,
            key=jax.random.fold_in(key, n),
        )

    def __call__(self, x: Float[Array, "*batch d_model"]) -> Float[Array, "*batch d_model"]:
        return self.mlp(x)
