"""From the config to an optax optimizer."""

import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from gptlite.config import OptimizerConfig
from gptlite.errors import require
from gptlite.machine.pytrees import inside, is_parameter, path_name
from gptlite.nn.embedding import Embedding
from gptlite.nn.stack import Stack
from gptlite.training.muon import scale_by_orthogonalization

# As in Jordan et al.
MUON_MOMENTUM = 0.95
# The shape that learning rates are given for: that of the preset `quick`.
DEPTH, WIDTH = 3, 128
# The matrices in a stack that write to the residual stream: attention's last one, and the MLP's.
WRITES = re.compile(r"\.output\.weight$|\.mlp\.down\.weight$")
HEAD = re.compile(r"(^|\.)head\.weight$")


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

    muon: Jordan et al., 2024, on the matrices of the blocks; Adam on all other parameters. The
    rates are those of a model of `DEPTH` layers and width `WIDTH`, and are scaled so that they are
    as good for others: the head's Adam rate by `WIDTH / d_model` (Yang et al., 2022, "Tensor
    Programs V", table 8), and what writes to the residual stream by `DEPTH / n_layers` (Dey et al.,
    2025, "CompleteP"). Muon's own update is already of one size for all widths.

    adamw: AdamW (Loshchilov and Hutter, 2019), with one rate for all.

    Weight decay acts on what has two axes or more in a layer, with the rate that is not scaled.

    **Raises:** `UserError` if there is no matrix for muon.
    """
    in_stack, in_table = inside(params, Stack), inside(params, Embedding)
    decayed = jax.tree.map(lambda p, stacked: p.ndim - stacked >= 2, params, in_stack)
    adam = optax.scale_by_adam(config.beta1, config.beta2)
    if config.name == "adamw":
        direction, rates = adam, jax.tree.map(lambda _: config.learning_rate, params)
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
        muon = optax.chain(optax.trace(MUON_MOMENTUM, nesterov=True), scale_by_orthogonalization())
        kinds = jax.tree.map(lambda by_muon: "muon" if by_muon else "adam", matrix)
        # A function: optax would call the tree itself, because it is a model.
        direction = optax.partition({"muon": muon, "adam": adam}, lambda _: kinds)
        shares = jax.tree_util.tree_map_with_path(_share_of_shape, params, matrix)
        direction = optax.chain(direction, _times(shares))
        rates = jax.tree.map(
            lambda by_muon: config.learning_rate if by_muon else config.adam_learning_rate, matrix
        )
    optimizer = optax.chain(
        direction,
        optax.add_decayed_weights(config.weight_decay, lambda _: decayed),
        _times(jax.tree.map(operator.neg, rates)),
    )
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    return optimizer if config.state_dtype == "float32" else _kept_in(jnp.bfloat16, optimizer)


def _share_of_shape(path: tuple[Any, ...], p: Any, by_muon: bool) -> float:
    """The rate of a parameter for the model's shape, over that for `DEPTH` and `WIDTH`."""
    name = path_name(path)
    if by_muon and WRITES.search(name):
        return DEPTH / p.shape[0]
    return WIDTH / p.shape[-1] if HEAD.search(name) else 1.0


def _times(factors: PyTree) -> optax.GradientTransformation:
    """Multiplies each update by its factor."""
    return optax.stateless(lambda updates, _: jax.tree.map(operator.mul, updates, factors))


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
