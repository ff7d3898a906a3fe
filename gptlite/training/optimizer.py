"""From the config to an optax optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from gptlite.config import OptimizerConfig
from gptlite.errors import require
from gptlite.machine.pytrees import inside, is_parameter
from gptlite.nn.embedding import Embedding
from gptlite.nn.stack import Stack
from gptlite.training.muon import scale_by_orthogonalization

# As in Jordan et al.
MUON_MOMENTUM = 0.95


def schedule_points(config: OptimizerConfig, steps: int) -> Int[np.ndarray, "3"]:
    """The steps at which the schedule of a run of `steps` steps changes: where warm-up ends, where
    the fall begins, and where it ends. An argument of `peak_share`, so that a run of another length
    is the same program."""
    warmup = round(config.warmup_fraction * steps)
    rest = max(1, steps - warmup)
    # The last step is at the end of the decay; a step at 0 would change nothing.
    last = 1 if config.final_fraction > 0 else 0
    decay = round(config.decay_fraction * steps) if config.schedule == "wsd" else rest
    decay = max(1, decay - last)
    begin = warmup + max(0, rest - last - decay)
    return np.array([warmup, begin, begin + decay], np.int32)


def peak_share(
    config: OptimizerConfig, step: ArrayLike, points: Int[ArrayLike, "3"]
) -> Float[Array, ""]:
    """The learning rate of a step, counted from 0, as a share of its peak, in 0 to 1."""
    warmup, begin, end = jnp.asarray(points, jnp.float32)
    step, final = jnp.asarray(step, jnp.float32), config.final_fraction
    fallen = jnp.clip((step - begin) / (end - begin), 0.0, 1.0)
    if config.schedule == "cosine":
        after = final + (1.0 - final) * (1.0 + jnp.cos(jnp.pi * fallen)) / 2
    elif config.schedule == "constant":
        after = jnp.ones(())
    elif config.schedule == "noam":
        after = jnp.sqrt((warmup + 1.0) / (step + 1.0))
    else:
        after = 1.0 - (1.0 - final) * fallen
    # From 1 / (warmup + 1): a first step at 0 would change nothing.
    return jnp.where(step < warmup, (step + 1.0) / (warmup + 1.0), after)


def make_optimizer(config: OptimizerConfig, params: PyTree) -> optax.GradientTransformation:
    """The optimizer of `params`, the trainable part of a model. Its updates are those at the peak
    of the learning rate, of which `peak_share` is the share of a step.

    muon: Jordan et al., 2024, on the matrices of the blocks; AdamW (Loshchilov and Hutter, 2019)
    on all other parameters. Weight decay acts on what has two axes or more in a layer.

    **Raises:** `UserError` if there is no matrix for muon.
    """
    in_stack, in_table = inside(params, Stack), inside(params, Embedding)
    decayed = jax.tree.map(lambda p, stacked: p.ndim - stacked >= 2, params, in_stack)
    if config.name == "adamw":
        optimizer = optax.adamw(
            config.learning_rate,
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
            config.adam_learning_rate,
            b1=config.beta1,
            b2=config.beta2,
        )
        muon = optax.chain(
            optax.trace(MUON_MOMENTUM, nesterov=True),
            scale_by_orthogonalization(),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(config.learning_rate),
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
