"""From the config to an optax optimizer."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PyTree

from gptlite.config import OptimizerConfig
from gptlite.errors import require
from gptlite.machine.pytrees import inside, is_parameter
from gptlite.nn.embedding import Embedding
from gptlite.nn.stack import Stack
from gptlite.training.muon import scale_by_orthogonalization

# As in Jordan et al.
MUON_MOMENTUM = 0.95


def make_schedule(config: OptimizerConfig, steps: int) -> Callable[[ArrayLike], Float[Array, ""]]:
    """The learning rate of each step as a share of its peak, in 0 to 1."""
    warmup = round(config.warmup_fraction * steps)
    rest = max(1, steps - warmup)
    # The last step is at the end of the decay; a step at 0 would change nothing.
    final, last = config.final_fraction, 1 if config.final_fraction > 0 else 0
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(1.0, max(1, rest - last), alpha=final)
    elif config.schedule == "linear":
        after = optax.linear_schedule(1.0, final, max(1, rest - last))
    elif config.schedule == "constant":
        after = optax.constant_schedule(1.0)
    elif config.schedule == "noam":
        after = functools.partial(_inverse_sqrt, warmup + 1)
    else:
        decay = max(1, round(config.decay_fraction * steps) - last)
        begin = max(0, rest - last - decay)
        after = optax.linear_schedule(1.0, final, decay, transition_begin=begin)
    if warmup > 0:
        # From 1 / (warmup + 1): a first step at 0 would change nothing.
        rise = optax.linear_schedule(1.0 / (warmup + 1), 1.0, warmup)
        after = optax.join_schedules([rise, after], [warmup])
    return lambda step: jnp.asarray(after(step), jnp.float32)


def _inverse_sqrt(warmup_steps: int, step: ArrayLike) -> Array:
    """`sqrt(warmup_steps / (warmup_steps + step))`: 1 at the end of warm-up."""
    return jnp.sqrt(warmup_steps / (warmup_steps + jnp.asarray(step)))


def make_optimizer(
    config: OptimizerConfig, steps: int, params: PyTree
) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps on `params`, the trainable part of a model.

    muon: Jordan et al., 2024, on the matrices of the blocks; AdamW (Loshchilov and Hutter, 2019)
    on all other parameters. Weight decay acts on what has two axes or more in a layer.

    **Raises:** `UserError` if there is no matrix for muon.
    """
    schedule = make_schedule(config, steps)

    def rate(peak: float) -> Callable[[ArrayLike], Array]:
        return lambda step: peak * schedule(step)

    in_stack, in_table = inside(params, Stack), inside(params, Embedding)
    decayed = jax.tree.map(lambda p, stacked: p.ndim - stacked >= 2, params, in_stack)
    if config.name == "adamw":
        optimizer = optax.adamw(
            rate(config.learning_rate),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=lambda _: decayed,
        )
    else:
        matrix = jax.tree.map(
            lambda p, stacked, table: stacked and not table and p.ndim == 3,
            params,
            in_stack,
            in_table,
        )
        require(
            any(jax.tree.leaves(matrix)),
            "The optimizer muon is for the matrices of a Stack, and none is trained: use adamw, or "
            "a model that has not been unstacked, or freeze less.",
        )
        kinds = jax.tree.map(
            lambda by_muon, decays: "muon" if by_muon else "decayed" if decays else "plain",
            matrix,
            decayed,
        )
        adam = functools.partial(
            optax.adamw,
            rate(config.adam_learning_rate),
            b1=config.beta1,
            b2=config.beta2,
        )
        muon = optax.chain(
            optax.trace(MUON_MOMENTUM, nesterov=True),
            scale_by_orthogonalization(),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(rate(config.learning_rate)),
        )
        optimizer = optax.partition(
            {
                "muon": muon,
                "decayed": adam(weight_decay=config.weight_decay),
                "plain": adam(weight_decay=0.0),
            },
            # A function: optax would call the tree itself, because it is a model.
            lambda _: kinds,
        )
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    return optimizer if config.state_dtype == "float32" else _kept_in(jnp.bfloat16, optimizer)


def _kept_in(
    dtype: DTypeLike, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`optimizer`, which computes in float32, with its state kept in `dtype` between steps."""

    def cast(state, dtype):
        return jax.tree.map(lambda x: x.astype(dtype) if is_parameter(x) else x, state)

    def update(updates, state, params=None):
        updates, state = optimizer.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(optimizer.init(params), dtype), update)
