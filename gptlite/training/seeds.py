"""One model trained from several seeds at the same time, in one compiled program.

The seeds have an axis of their own, shared out over the devices; on each device, its seeds run
side by side (`jax.vmap`). What seed s gets is what it would get alone: `train.py --training.seed s`
on one device gives the same up to the order of sums.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from gptlite.config import Config
from gptlite.models.gpt import GPT
from gptlite.text.batches import Batches
from gptlite.text.tokens import Split
from gptlite.training.evaluate import evaluation_batches, summed_loss
from gptlite.training.feed import make_feed
from gptlite.training.optimizer import make_optimizer
from gptlite.training.step import TrainState, init_state, run_steps

BY_SEED = PartitionSpec("seeds")


@dataclass(frozen=True)
class SeedsProgress:
    """After steps. Losses are in nats a token, one a seed."""

    step: int
    steps: int
    """When all is done."""
    train_losses: Sequence[float]
    """Of the last step."""
    val_losses: Sequence[float] | None
    """Where an evaluation was due."""
    step_seconds: float
    """Spent on steps so far, by all seeds together, without compilation and evaluations."""


def fit_seeds(
    config: Config,
    make_model: Callable[[PRNGKeyArray], GPT],
    seeds: Sequence[int],
    split: Split,
) -> Iterator[SeedsProgress]:
    """Train `make_model(key)` as `config` says, once for each of `seeds`, which take the place of
    `training.seed`.

    Yields after every dispatch of `steps_per_dispatch` steps, and at evaluations. A seed whose
    loss is no longer finite goes on, and shows. The steps are compiled before this returns.

    **Raises:** `UserError` if the text is too short.
    """
    training, context = config.training, config.model.context_length
    devices = min(jax.device_count(), len(seeds))
    mesh = jax.make_mesh(
        (devices, 1),
        ("seeds", "data"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=jax.devices()[:devices],
    )
    everywhere, by_seed = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, BY_SEED)
    capacity = min(training.steps_per_dispatch, training.steps)
    feeds = [
        make_feed(Batches(split.train, training.batch_size, context, seed), capacity, everywhere)
        for seed in seeds
    ]
    windows, targets = evaluation_batches(split.validation, context, 1)
    held_out = jax.device_put(windows, everywhere)
    # All devices have as many: the last seed fills the gaps, and is left out of what is reported.
    places = [min(place, len(seeds) - 1) for place in range(len(seeds) + -len(seeds) % devices)]
    seed_of = jax.device_put(np.array([seeds[place] for place in places], np.int32), by_seed)

    # As train.py draws it.
    models = eqx.filter_jit(
        eqx.filter_vmap(lambda seed: make_model(jax.random.split(jax.random.key(seed))[0]))
    )(seed_of)
    one = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, models)
    optimizer = make_optimizer(config.optimizer, training.steps, one)
    states = eqx.filter_jit(eqx.filter_vmap(lambda model: init_state(model, optimizer)))(models)

    @eqx.filter_jit(donate="all-except-first")
    def train(
        data: tuple[Array, Array],
        states: TrainState,
        count: Int[Array, ""],
    ) -> tuple[TrainState, Float[Array, "seeds steps"]]:
        arrays, static = eqx.partition(states, eqx.is_array)

        def on_device(arrays, batches, seeds, count):
            def alone(arrays, batches, seed):
                state = eqx.combine(arrays, static)
                state, metrics = run_steps(training, optimizer, state, batches, count, seed)
                return eqx.filter(state, eqx.is_array), metrics.loss

            return jax.vmap(alone)(arrays, batches, seeds)

        arrays, losses = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(BY_SEED, BY_SEED, BY_SEED, PartitionSpec()),
            out_specs=BY_SEED,
            check_vma=False,
        )(arrays, *data, count)
        return eqx.combine(arrays, static), losses

    @eqx.filter_jit
    def evaluate(models: GPT, batches: Int[Array, "batches rows seq_and_next"]) -> Array:
        arrays, static = eqx.partition(models, eqx.is_array)

        def on_device(arrays, batches):
            return jax.vmap(lambda a: summed_loss(eqx.combine(a, static), batches))(arrays)

        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(BY_SEED, PartitionSpec()),
            out_specs=BY_SEED,
            check_vma=False,
        )(arrays, batches)

    def dispatch(states: TrainState, step: int, count: int) -> tuple[TrainState, Array]:
        batches = [feed(step, count) for feed in feeds]
        stacked = jax.device_put(jnp.stack([batches[place] for place in places]), by_seed)
        return train((stacked, seed_of), states, jnp.asarray(count))

    # No steps: compiles, so that the seconds below are those of steps.
    states, _ = dispatch(eqx.filter_shard(states, by_seed), 0, 0)

    def loop(states: TrainState) -> Iterator[SeedsProgress]:
        step, step_seconds = 0, 0.0
        while step < training.steps:
            to_look = training.eval_every - step % training.eval_every
            count = min(capacity, to_look, training.steps - step)
            began = time.perf_counter()
            states, losses = dispatch(states, step, count)
            losses = np.asarray(losses)[: len(seeds), count - 1]
            step_seconds += time.perf_counter() - began
            step += count
            look = step % training.eval_every == 0 or step == training.steps
            summed = evaluate(states.model, held_out) if look else None
            yield SeedsProgress(
                step=step,
                steps=training.steps,
                train_losses=losses.tolist(),
                val_losses=None
                if summed is None
                else (np.asarray(summed) / targets).tolist()[: len(seeds)],
                step_seconds=step_seconds,
            )

    return loop(states)
