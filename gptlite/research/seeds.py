"""One model trained from several seeds at the same time, in one compiled program.

The seeds have an axis of their own, which the devices share out; each device runs its seeds side by
side (`jax.vmap`). Seed s gets the losses that it would get alone: `gptlite train --training.seed s`
gives the same up to the order of sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from gptlite.config import Config
from gptlite.machine.mesh import replicate
from gptlite.runs.frozen import trainable
from gptlite.runs.model import make_model
from gptlite.sharding import AXES
from gptlite.text.batches import Batches, evaluation_batches
from gptlite.text.tokenizer import Tokenizer
from gptlite.text.tokens import Split
from gptlite.training.evaluate import summed_loss
from gptlite.training.fit import fit
from gptlite.training.step import TrainState, TrainSteps, copied

# The axis of the mesh, and of every array.
SEEDS = "seeds"


def seeds_mesh(models: int) -> Mesh:
    """A mesh whose devices train `models` models in parallel: the axis `seeds`, and the other axes
    with a single device."""
    devices = jax.devices()[: min(jax.device_count(), models)]
    names = (SEEDS, *AXES)
    shape = (len(devices), 1, 1, 1)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=devices)


class SeedsSteps(TrainSteps):
    """The update of several models side by side: every array of the state begins with an axis of
    seeds, and batches are `[steps, seeds, batch, ...]`."""

    def __init__(self, model: eqx.Module, config: Config, mesh: Mesh, seeds: Sequence[int]):
        super().__init__(
            model, config.optimizer, config.training, mesh, trainable=trainable(config, model)
        )
        self._seeds = self._put(jnp.asarray(seeds, jnp.int32))
        self.batch_shape = (len(seeds), config.training.batch_size)

    def _put(self, tree: Any, *axes: None) -> Any:
        """`tree`, with the axis of seeds, which follows `axes`, sharded over the devices."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes, SEEDS))
        return eqx.filter_shard(tree, sharding)

    def init(self, model: Any) -> TrainState:
        """As `TrainSteps.init`, for models that are stacked."""
        model = self._put(copied(model))
        with jax.set_mesh(self.mesh):
            init = eqx.filter_jit(eqx.filter_vmap(self.init_optimizer))
            optimizer_state = init(eqx.filter(model, self.trainable))
        steps = jnp.zeros(self._seeds.shape, jnp.int32)
        return self._put(TrainState(model, optimizer_state, steps))

    def place(self, batches: Any, count: int) -> Any:
        batches = self._put(jax.tree.map(jnp.asarray, batches), None)
        return batches, *self._numbers(count), self._seeds

    def update(self, state: TrainState, batches: Any, count: Any, points: Any, seed: Any) -> Any:
        update = eqx.filter_vmap(super().update, in_axes=(eqx.if_array(0), 1, None, None, 0))
        return update(state, batches, count, points, seed)


@eqx.filter_jit
def _summed_losses(models: Any, batches: Any) -> Any:
    return eqx.filter_vmap(lambda model: summed_loss(model, batches))(models)


@dataclass(frozen=True)
class SeedsProgress:
    """The state after a dispatch."""

    step: int
    steps: int
    """Steps in total."""
    val_losses: Sequence[float] | None
    """Where an evaluation was due: nats per token, one per seed."""
    step_seconds: float
    """Spent on steps so far, by all seeds together, without compilation and evaluations."""


def fit_seeds(
    config: Config,
    tokenizer: Tokenizer,
    seeds: Sequence[int],
    split: Split,
    *,
    drawn_from: Sequence[int] | None = None,
) -> Iterator[SeedsProgress]:
    """Train the model of `config`, once for each of `seeds`, which replace `training.seed`.

    `drawn_from`: the seeds that the first parameters are drawn from. Default: `seeds`.

    A seed whose loss is no longer finite continues. The steps are compiled before this returns.

    **Raises:** `UserError` if the text is too short.
    """
    training, context_length = config.training, config.model.context_length
    seeds, mesh = list(seeds), seeds_mesh(len(seeds))
    # Every device trains the same number of seeds. Copies of the last seed fill the gaps, and are
    # not reported.
    gaps = -len(seeds) % mesh.shape[SEEDS]
    filled = [*seeds, *seeds[-1:] * gaps]
    drawn_from = seeds if drawn_from is None else drawn_from
    drawn_from = [*drawn_from, *drawn_from[-1:] * gaps]
    batches = [Batches(split.train, training.batch_size, context_length, seed) for seed in filled]

    @eqx.filter_jit
    @eqx.filter_vmap
    def draw(seed):  # as in `gptlite train`
        return make_model(config.model, tokenizer, key=jax.random.split(jax.random.key(seed))[0])

    models = draw(jnp.asarray(drawn_from, jnp.int32))
    one = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, models)
    train_steps = SeedsSteps(one, config, mesh, filled)
    evaluation, targets = evaluation_batches(split.validation, context_length, devices=1)
    evaluation = replicate(evaluation, mesh)
    fitting = fit(
        train_steps.init(models),
        train_steps,
        lambda step: np.stack([batch(step) for batch in batches]),
        stop_on_nonfinite=False,
    )

    def loop() -> Iterator[SeedsProgress]:
        for progress in fitting:
            losses = None
            if progress.evaluation_due:
                with jax.set_mesh(mesh):
                    summed = np.asarray(_summed_losses(progress.state.model, evaluation))
                losses = (summed.astype(np.float64) / targets)[: len(seeds)].tolist()
            seconds = progress.position.step_seconds
            yield SeedsProgress(progress.step, training.steps, losses, seconds)

    return loop()
